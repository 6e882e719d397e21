"""Which adapters to bring nearer, and where: a pure function of demand and of who holds what.

Requests alone already bring adapters to replicas. This is for what they are slow at: a replica that
has just joined, adapters whose replica has died, arenas with free room. It fills free room, and has
something evicted only for what is wanted at least twice as much; so a fleet in its stride gets no
orders, and two equal adapters never swap. It takes plain values: a simulator can call it as well.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lorikeet.placement.tier_budget import TierBudget
from lorikeet.rendezvous import preferred
from lorikeet_engine.adapter import Residency

POPULAR = 0.5
"""Uses from which an adapter counts as in use: one in the last 45 s, or one every 130 s."""
MOST_MOVES = 16
"""PlacementDecision for one replica at one time, of MOST_BYTES in all if there are several."""
MOST_BYTES = 10**9  # a link to the store carries them in a second
# Uses of each copy that make another one worthwhile: one use every 8 s.
_SPREAD = 8.0
# Of a replica's share of all uses: what one copy may have, and below which a replica has too few.
_FULL = 0.8
# Of a tier, what must be free before it is filled: less is what sizes leave over, and moves on.
_IDLE = 0.1
# What is evicted for an adapter has at most half its uses, and it has at least so many itself.
_ADVANTAGE = 2.0
_WORTH_AN_EVICTION = 4.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica, as placement sees it.

    gpu_bytes, host_bytes: what adapters without a pin can take there. held: where adapters are.
    uses: how often each was used there; the least used for its size is evicted first. kept: at
    which tier adapters are pinned; those take nothing of the bytes above.
    """

    gpu_bytes: int
    host_bytes: int
    held: Mapping[str, Residency] = field(default_factory=dict)
    uses: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, Residency] = field(default_factory=dict)


class Prefetch(NamedTuple):
    """An adapter to bring to a tier, if that costs nobody. uses: how many it should draw there."""

    digest: str
    tier: Residency
    uses: float


def prefetch_popular(
    demand: Mapping[str, float],
    sizes: Mapping[str, int],
    sites: Mapping[str, ReplicaView],
    *,
    spares: bool = False,
) -> dict[str, list[Prefetch]]:
    """What each replica should bring nearer; replicas that should do nothing are left out.

    demand: uses by digest, over all replicas of one base model. sizes: bytes of images by digest;
    an adapter of unknown size stays where it is. Copies on GPUs come first: one of each adapter in
    use, as many of a hot one as its share of all uses asks for, and more of the hottest where a
    replica with free room has less than its share. Then what is on no GPU comes to a host. spares:
    every adapter in use comes to GPU or host of a second replica, so that any one can go.
    """
    draft = _Draft(demand, sizes, sites)
    draft.spread()
    draft.level()
    draft.shelter(2 if spares else 1)
    return {name: orders for name, orders in draft.orders.items() if orders}


def sole_copies(demand: Mapping[str, float], sites: Mapping[str, ReplicaView]) -> dict[str, float]:
    """The share of the adapters in use that each replica has near, and no other replica has.

    Near is on the GPU or the host.
    """
    holder: dict[str, str | None] = {}
    for name, site in sites.items():
        for digest, tier in site.held.items():
            if tier >= Residency.HOST and demand.get(digest, 0.0) >= POPULAR:
                holder[digest] = None if digest in holder else name
    lonely = Counter(holder.values())
    return {name: round(lonely[name] / max(1, len(holder)), 3) for name in sites}


class _Draft:
    """PlacementDecision in the making, and the fleet as it will be when they are carried out."""

    def __init__(
        self,
        demand: Mapping[str, float],
        sizes: Mapping[str, int],
        sites: Mapping[str, ReplicaView],
    ) -> None:
        self._names = tuple(sorted(sites))
        self.orders: dict[str, list[Prefetch]] = {name: [] for name in self._names}
        self._demand, self._sizes, self._sites = demand, sizes, sites
        self._ordered_bytes = dict.fromkeys(self._names, 0)
        self._budgets: dict[Residency, dict[str, TierBudget]] = {
            Residency.GPU: {name: TierBudget(sites[name].gpu_bytes) for name in self._names},
            Residency.HOST: {name: TierBudget(sites[name].host_bytes) for name in self._names},
        }
        self._on_gpu: dict[str, list[str]] = {}  # digest → replicas
        self._near: dict[str, list[str]] = {}  # on the GPU or the host
        self._leaving: set[str] = set()
        for name in self._names:
            self._take_stock(name, sites[name])
        self._idle = {
            tier: {name for name, budget in budgets.items() if budget.free_share >= _IDLE}
            for tier, budgets in self._budgets.items()
        }
        wanted = (digest for digest, uses in demand.items() if uses >= POPULAR and digest in sizes)
        self._wanted = sorted(wanted, key=lambda digest: (-demand[digest], digest))
        self._share = sum(demand.values()) / max(1, len(sites))

    def spread(self) -> None:
        """Copies on GPUs by demand, the most useful first."""
        line = [copy for digest in self._wanted if (copy := self._next_copy(digest)) is not None]
        heapify(line)
        refused = float("inf")  # what has no room anywhere leaves none for what is wanted less
        while line:
            loss, digest = heappop(line)
            if self._sizes[digest] >= refused:
                continue
            if self._bring(digest, Residency.GPU, -loss):
                another = self._next_copy(digest)
                if another is not None:
                    heappush(line, another)
            elif not self._there(digest, Residency.GPU):
                refused = self._sizes[digest]

    def level(self) -> None:
        """Copies of the hottest where a replica has less than its share, and free room."""
        loads = dict.fromkeys(self._names, 0.0)
        for digest, holders in self._on_gpu.items():
            for name in holders:
                loads[name] += self._demand.get(digest, 0.0) / len(holders)
        hottest = [digest for digest in self._wanted if self._there(digest, Residency.GPU)]
        hottest.sort(key=lambda digest: -self._demand[digest] / len(self._on_gpu[digest]))
        for name in self._names:
            if loads[name] < _FULL * self._share:
                self._level(name, loads, hottest)

    def shelter(self, copies: int) -> None:
        """So many replicas that have each adapter in use on GPU or host."""
        worth = _WORTH_AN_EVICTION if copies == 1 else 0.0  # spares are for moments of calm
        for digest in self._wanted:
            if digest in self._leaving:  # whether it has truly gone is known next time
                continue
            for before in range(len(self._near.get(digest, ())), min(copies, len(self._names))):
                uses = self._demand[digest] / (before + 1)
                if not self._bring(digest, Residency.HOST, uses, worth):
                    break

    def _take_stock(self, name: str, site: ReplicaView) -> None:
        for digest, tier in site.held.items():
            if tier < Residency.HOST:
                continue
            self._note(name, digest, tier)
            if tier > site.kept.get(digest, Residency.REMOTE):
                size, uses = self._sizes.get(digest, 0), site.uses.get(digest, 0.0)
                self._budgets[tier][name].hold(digest, size, uses)
                if tier is Residency.GPU:  # the host keeps its copy, and is soon full of them
                    self._budgets[Residency.HOST][name].free_bytes -= size
        for digest, tier in site.kept.items():
            if tier >= Residency.HOST and site.held.get(digest, Residency.REMOTE) < tier:
                self._note(name, digest, tier)

    def _note(self, name: str, digest: str, tier: Residency) -> None:
        if tier is Residency.GPU:
            self._on_gpu.setdefault(digest, []).append(name)
        near = self._near.setdefault(digest, [])
        if name not in near:
            near.append(name)

    def _next_copy(self, digest: str) -> tuple[float, str] | None:
        """The uses that one more copy would draw, negative for a heap; None if it should not be."""
        uses, copies = self._demand[digest], len(self._on_gpu.get(digest, ()))
        another = uses / (copies + 1)
        if copies and (uses / copies <= _FULL * self._share or another < _SPREAD):
            return None
        return (-another, digest) if copies < len(self._names) else None

    def _level(self, name: str, loads: dict[str, float], hottest: list[str]) -> None:
        for digest in hottest:
            if loads[name] >= self._share:
                return
            holders = list(self._on_gpu[digest])
            after = self._demand[digest] / (len(holders) + 1)
            less = self._demand[digest] / len(holders) - after
            if name in holders or after < _SPREAD:
                continue
            if min(loads[holder] for holder in holders) - less < _FULL * self._share:
                continue  # or they would soon want copies in turn
            if self._has_room(name, digest, Residency.GPU):
                self._order(name, Prefetch(digest, Residency.GPU, after), [])
                loads[name] += after
                for holder in holders:
                    loads[holder] -= less

    def _bring(
        self, digest: str, tier: Residency, uses: float, worth: float = _WORTH_AN_EVICTION
    ) -> bool:
        """Order it where it is nearest already, else where requests for it would go first.

        worth: uses from which others may be evicted for it.
        """
        order = [
            name for name in preferred(digest, self._names) if name not in self._there(digest, tier)
        ]
        order.sort(key=lambda name: -self._sites[name].held.get(digest, Residency.REMOTE))
        for name in order:
            if self._has_room(name, digest, tier):
                self._order(name, Prefetch(digest, tier, uses), [])
                return True
        if uses >= worth:
            for name in order:
                victims = self._victims(name, digest, tier, uses)
                if victims is not None:
                    self._order(name, Prefetch(digest, tier, uses), victims)
                    return True
        return False

    def _there(self, digest: str, tier: Residency) -> list[str]:
        holders = self._on_gpu if tier is Residency.GPU else self._near
        return holders.get(digest, [])

    def _may_order(self, name: str, size: int) -> bool:
        orders = len(self.orders[name])
        fits = self._ordered_bytes[name] + size <= MOST_BYTES
        return not orders or (fits and orders < MOST_MOVES)

    def _has_room(self, name: str, digest: str, tier: Residency) -> bool:
        size, idle = self._sizes[digest], name in self._idle[tier]
        fits = size <= self._budgets[tier][name].free_bytes
        return idle and fits and self._may_order(name, size)

    def _victims(self, name: str, digest: str, tier: Residency, uses: float) -> list[str] | None:
        size = self._sizes[digest]
        if not self._may_order(name, size):
            return None

        def loss(victim: str) -> float:
            return self._demand.get(victim, 0.0) / len(self._there(victim, tier))

        return self._budgets[tier][name].victims(size, uses / _ADVANTAGE, loss)

    def _order(self, name: str, order: Prefetch, victims: list[str]) -> None:
        for victim in victims:
            self._there(victim, order.tier).remove(name)
            self._leaving.add(victim)
        size = self._sizes[order.digest]
        self._budgets[order.tier][name].put(size, victims)
        self.orders[name].append(order)
        self._ordered_bytes[name] += size
        self._note(name, order.digest, order.tier)
