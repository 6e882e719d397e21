"""Which adapters to prefetch, and where: a pure function of demand and of what replicas hold.

Requests alone already load adapters. Prefetches are for what requests are slow at: a replica that
has just joined, adapters whose replica has died, arenas with free room. They fill free room, and
evict only for what is used at least twice as much; so a steady fleet gets none, and two equal
adapters never swap. The function takes plain values: the simulator calls it as well.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lorikeet.rendezvous import preferred
from lorikeet_engine.adapter import Residency

POPULAR = 0.5
"""Uses from which an adapter counts as in use: one in the last 45 s, or one every 130 s."""
MOST_PREFETCHES = 16
"""Prefetches of one replica at one time, of MOST_BYTES in all if there are several."""
MOST_BYTES = 10**9  # a link to the store carries them in a second
# Uses of each copy that make another one worthwhile: one use every 8 s.
_USES_PER_COPY = 8.0
# Of a replica's share of all uses: what one copy may have, and below which a replica has too few.
_FULL_SHARE = 0.8
# Of a tier, what must be free before it is filled: less is what sizes leave over, and moves on.
_FREE_SHARE = 0.1
# What is evicted for an adapter has at most half its uses, and it has at least this many itself.
_ADVANTAGE = 2.0
_USES_TO_EVICT = 4.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica, as placement sees it.

    gpu_bytes, host_bytes: what adapters without a pin can take there. held: where adapters are.
    uses: how often each was used there; the least used for its size is evicted first. pinned: at
    which tier adapters are pinned; those take nothing of the bytes above.
    """

    gpu_bytes: int
    host_bytes: int
    held: Mapping[str, Residency] = field(default_factory=dict)
    uses: Mapping[str, float] = field(default_factory=dict)
    pinned: Mapping[str, Residency] = field(default_factory=dict)


class Prefetch(NamedTuple):
    """An adapter to load to a tier at low priority. uses: how many it should draw there."""

    digest: str
    tier: Residency
    uses: float


def plan_prefetches(
    demand: Mapping[str, float],
    sizes: Mapping[str, int],
    replicas: Mapping[str, ReplicaView],
    *,
    spares: bool = False,
) -> dict[str, list[Prefetch]]:
    """The prefetches of each replica; replicas without any are left out.

    demand: uses by digest, over all replicas of one base model. sizes: bytes of images by digest;
    an adapter of unknown size stays where it is. Copies on GPUs come first: one of each adapter in
    use, as many of a hot one as its share of all uses asks for, and more of the hottest where a
    replica with free room has less than its share. Then what is on no GPU comes to a host. spares:
    every adapter in use comes to GPU or host of a second replica, so that any one can go.
    """
    draft = _Draft(demand, sizes, replicas)
    draft.copy_by_demand()
    draft.balance()
    draft.copy_to_hosts(2 if spares else 1)
    return {name: prefetches for name, prefetches in draft.prefetches.items() if prefetches}


def sole_copies(
    demand: Mapping[str, float], replicas: Mapping[str, ReplicaView]
) -> dict[str, float]:
    """The share of the adapters in use that only one replica has on GPU or host, by replica."""
    holder: dict[str, str | None] = {}
    for name, replica in replicas.items():
        for digest, tier in replica.held.items():
            if tier >= Residency.HOST and demand.get(digest, 0.0) >= POPULAR:
                holder[digest] = None if digest in holder else name
    sole = Counter(holder.values())
    return {name: round(sole[name] / max(1, len(holder)), 3) for name in replicas}


class _Draft:
    """Prefetches in the making, and the fleet as it will be once they are done."""

    def __init__(
        self,
        demand: Mapping[str, float],
        sizes: Mapping[str, int],
        replicas: Mapping[str, ReplicaView],
    ) -> None:
        self._names = tuple(sorted(replicas))
        self.prefetches: dict[str, list[Prefetch]] = {name: [] for name in self._names}
        self._demand, self._sizes, self._replicas = demand, sizes, replicas
        self._planned_bytes = dict.fromkeys(self._names, 0)
        self._budgets: dict[Residency, dict[str, _TierBudget]] = {
            Residency.GPU: {name: _TierBudget(replicas[name].gpu_bytes) for name in self._names},
            Residency.HOST: {name: _TierBudget(replicas[name].host_bytes) for name in self._names},
        }
        self._on_gpu: dict[str, list[str]] = {}  # digest → replicas
        self._holders: dict[str, list[str]] = {}  # those with it on the GPU or the host
        self._evicted: set[str] = set()
        for name in self._names:
            self._add_replica(name, replicas[name])
        self._roomy = {
            tier: {name for name, budget in budgets.items() if budget.free_share >= _FREE_SHARE}
            for tier, budgets in self._budgets.items()
        }
        wanted = (digest for digest, uses in demand.items() if uses >= POPULAR and digest in sizes)
        self._wanted = sorted(wanted, key=lambda digest: (-demand[digest], digest))
        self._share = sum(demand.values()) / max(1, len(replicas))

    def copy_by_demand(self) -> None:
        """Plan copies on GPUs by demand, the most useful first."""
        queue = [copy for digest in self._wanted if (copy := self._next_copy(digest)) is not None]
        heapify(queue)
        refused = float("inf")  # what has no room anywhere leaves none for what is used less
        while queue:
            loss, digest = heappop(queue)
            if self._sizes[digest] >= refused:
                continue
            if self._plan(digest, Residency.GPU, -loss):
                another = self._next_copy(digest)
                if another is not None:
                    heappush(queue, another)
            elif not self._held_by(digest, Residency.GPU):
                refused = self._sizes[digest]

    def balance(self) -> None:
        """Plan copies of the hottest for replicas with free room and less than their share."""
        uses = dict.fromkeys(self._names, 0.0)
        for digest, holders in self._on_gpu.items():
            for name in holders:
                uses[name] += self._demand.get(digest, 0.0) / len(holders)
        hottest = [digest for digest in self._wanted if self._held_by(digest, Residency.GPU)]
        hottest.sort(key=lambda digest: -self._demand[digest] / len(self._on_gpu[digest]))
        for name in self._names:
            if uses[name] < _FULL_SHARE * self._share:
                self._take_share(name, uses, hottest)

    def copy_to_hosts(self, copies: int) -> None:
        """Plan until `copies` replicas have each adapter in use on GPU or host."""
        uses_to_evict = _USES_TO_EVICT if copies == 1 else 0.0  # spares are for moments of calm
        for digest in self._wanted:
            if digest in self._evicted:  # whether it is truly evicted is known next time
                continue
            for before in range(len(self._holders.get(digest, ())), min(copies, len(self._names))):
                uses = self._demand[digest] / (before + 1)
                if not self._plan(digest, Residency.HOST, uses, uses_to_evict):
                    break

    def _add_replica(self, name: str, replica: ReplicaView) -> None:
        for digest, tier in replica.held.items():
            if tier < Residency.HOST:
                continue
            self._add_holder(name, digest, tier)
            if tier > replica.pinned.get(digest, Residency.REMOTE):
                size, uses = self._sizes.get(digest, 0), replica.uses.get(digest, 0.0)
                self._budgets[tier][name].hold(digest, size, uses)
                if tier is Residency.GPU:  # the host keeps its copy, and is soon full of them
                    self._budgets[Residency.HOST][name].free_bytes -= size
        for digest, tier in replica.pinned.items():
            if tier >= Residency.HOST and replica.held.get(digest, Residency.REMOTE) < tier:
                self._add_holder(name, digest, tier)

    def _add_holder(self, name: str, digest: str, tier: Residency) -> None:
        if tier is Residency.GPU:
            self._on_gpu.setdefault(digest, []).append(name)
        holders = self._holders.setdefault(digest, [])
        if name not in holders:
            holders.append(name)

    def _next_copy(self, digest: str) -> tuple[float, str] | None:
        """The uses that one more copy would draw, negative for a heap; None if it should not be."""
        uses, copies = self._demand[digest], len(self._on_gpu.get(digest, ()))
        another = uses / (copies + 1)
        if copies and (uses / copies <= _FULL_SHARE * self._share or another < _USES_PER_COPY):
            return None
        return (-another, digest) if copies < len(self._names) else None

    def _take_share(self, name: str, uses: dict[str, float], hottest: list[str]) -> None:
        for digest in hottest:
            if uses[name] >= self._share:
                return
            holders = list(self._on_gpu[digest])
            after = self._demand[digest] / (len(holders) + 1)
            less = self._demand[digest] / len(holders) - after
            if name in holders or after < _USES_PER_COPY:
                continue
            if min(uses[holder] for holder in holders) - less < _FULL_SHARE * self._share:
                continue  # or they would soon want copies in turn
            if self._has_room(name, digest, Residency.GPU):
                self._add(name, Prefetch(digest, Residency.GPU, after), [])
                uses[name] += after
                for holder in holders:
                    uses[holder] -= less

    def _plan(
        self, digest: str, tier: Residency, uses: float, uses_to_evict: float = _USES_TO_EVICT
    ) -> bool:
        """Plan a copy where it is nearest already, else where requests for it would go first.

        uses_to_evict: from as many uses on, others may be evicted for it.
        """
        order = [
            name
            for name in preferred(digest, self._names)
            if name not in self._held_by(digest, tier)
        ]
        order.sort(key=lambda name: -self._replicas[name].held.get(digest, Residency.REMOTE))
        for name in order:
            if self._has_room(name, digest, tier):
                self._add(name, Prefetch(digest, tier, uses), [])
                return True
        if uses >= uses_to_evict:
            for name in order:
                victims = self._victims(name, digest, tier, uses)
                if victims is not None:
                    self._add(name, Prefetch(digest, tier, uses), victims)
                    return True
        return False

    def _held_by(self, digest: str, tier: Residency) -> list[str]:
        holders = self._on_gpu if tier is Residency.GPU else self._holders
        return holders.get(digest, [])

    def _may_add(self, name: str, size: int) -> bool:
        planned = len(self.prefetches[name])
        fits = self._planned_bytes[name] + size <= MOST_BYTES
        return not planned or (fits and planned < MOST_PREFETCHES)

    def _has_room(self, name: str, digest: str, tier: Residency) -> bool:
        size, roomy = self._sizes[digest], name in self._roomy[tier]
        fits = size <= self._budgets[tier][name].free_bytes
        return roomy and fits and self._may_add(name, size)

    def _victims(self, name: str, digest: str, tier: Residency, uses: float) -> list[str] | None:
        size = self._sizes[digest]
        if not self._may_add(name, size):
            return None

        def loss(victim: str) -> float:
            return self._demand.get(victim, 0.0) / len(self._held_by(victim, tier))

        return self._budgets[tier][name].victims(size, uses / _ADVANTAGE, loss)

    def _add(self, name: str, prefetch: Prefetch, victims: list[str]) -> None:
        for victim in victims:
            self._held_by(victim, prefetch.tier).remove(name)
            self._evicted.add(victim)
        size = self._sizes[prefetch.digest]
        self._budgets[prefetch.tier][name].put(size, victims)
        self.prefetches[name].append(prefetch)
        self._planned_bytes[name] += size
        self._add_holder(name, prefetch.digest, prefetch.tier)


class _TierBudget:
    """The free bytes of a tier, and which adapters are evicted for more.

    They go in the engines' own order: the least used for its size first.
    """

    def __init__(self, room_bytes: int) -> None:
        self.free_bytes = self._room_bytes = room_bytes
        self._sizes: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._order: list[str] | None = None  # the first to be evicted is last

    @property
    def free_share(self) -> float:
        """The share of the tier's room that is free."""
        return self.free_bytes / max(1, self._room_bytes)

    def hold(self, digest: str, size: int, uses: float) -> None:
        """Count an adapter that is there and may be evicted."""
        self.free_bytes -= size
        self._sizes[digest] = size
        self._scores[digest] = uses / math.sqrt(max(1, size))

    def victims(self, size: int, uses: float, loss: Callable[[str], float]) -> list[str] | None:
        """The adapters to evict for `size` bytes; None where that would lose more than `uses`."""
        if self._order is None:
            self._order = sorted(self._sizes, key=lambda d: (self._scores[d], d), reverse=True)
        victims: list[str] = []
        free = max(0, self.free_bytes)  # copies of what is on the GPU may take more than there is
        for digest in reversed(self._order):
            if free >= size:
                break
            uses -= loss(digest)
            if uses < 0:
                return None
            victims.append(digest)
            free += self._sizes[digest]
        return victims if free >= size else None

    def put(self, size: int, victims: list[str]) -> None:
        """Evict victims, the first to go, and take in what this plan never evicts."""
        for digest in victims:
            self.free_bytes += self._sizes.pop(digest)
        if victims and self._order is not None:
            del self._order[-len(victims) :]
        self.free_bytes -= size
