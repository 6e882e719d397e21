"""Plan of prefetches: a pure function of demand and of the adapters that replicas hold.

Requests load adapters by themselves. Prefetches serve cases in which requests alone would load
adapters too slowly: a replica has just joined, the replica with some adapters has died, or arenas
have free space. A prefetch fills free space, or evicts adapters with at most half the uses of its
own adapter. A steady fleet therefore gets no prefetches, and two equally used adapters never swap.
The function takes plain values, so that tests can call it alone.
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
"""Smallest number of decayed uses of an adapter that counts as in use.

An adapter reaches this number by one use in the last 45 s, or on average by one use every 130 s.
"""
MOST_PREFETCHES = 16
"""Limit on one replica's prefetches in one plan. If there are several, MOST_BYTES limits their
total size.
"""
MOST_BYTES = 10**9  # a link to the store carries them in a second
_USES_PER_COPY = 8.0  # uses that each copy must keep if another is made: one every 8 s
# Fraction of a replica's equal share of all uses: the most that one copy may carry before another
# is made, and the least that a replica must carry so that it is not underused.
_FULL_SHARE = 0.8
# Fraction of a tier that must be free before it is filled; less is fragmentation.
_FREE_SHARE = 0.1
_ADVANTAGE = 2.0  # least ratio of an adapter's uses to those of all adapters evicted for it
_USES_TO_EVICT = 4.0  # least uses of an adapter for which others are evicted


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica, as placement sees it.

    gpu_bytes: bytes of the GPU, free or taken, for adapters without a pin.
    host_bytes: bytes of host memory, free or taken, for adapters without a pin.
    held: tier nearest to the GPU in which the replica holds each adapter, by digest.
    uses: recent requests on the replica, a count that halves every 45 s, by digest; the adapter
        that is least used for its size is evicted first.
    pinned: tier of each pinned adapter, by digest; pinned adapters take none of the bytes above.
    """

    gpu_bytes: int
    host_bytes: int
    held: Mapping[str, Residency] = field(default_factory=dict)
    uses: Mapping[str, float] = field(default_factory=dict)
    pinned: Mapping[str, Residency] = field(default_factory=dict)


class Prefetch(NamedTuple):
    """An adapter to load to a tier at low priority.

    uses: part of the adapter's recent requests that the copy is expected to serve; a count that
        halves every 45 s.
    """

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
    """Return the planned prefetches by replica, without replicas that have none.

    Copies on GPUs come first: one copy of each adapter in use, further copies of a hot adapter in
    proportion to its share of all uses, and copies of the hottest adapters on replicas that have
    free space and serve less than their share of all uses. Then each adapter in use without a copy
    on any GPU or host gets a copy on a host.

    demand: recent requests, a count that halves every 45 s, by digest, over all replicas of one
        base model.
    sizes: bytes of adapters on a GPU by digest; adapters of unknown size are not moved.
    replicas: replicas by name.
    spares: give every adapter in use a second replica, on GPU or host, so that any replica can be
        removed.
    """
    draft = _Draft(demand, sizes, replicas)
    draft.copy_by_demand()
    draft.balance()
    draft.copy_to_hosts(2 if spares else 1)
    return {name: prefetches for name, prefetches in draft.prefetches.items() if prefetches}


def sole_copies(
    demand: Mapping[str, float], replicas: Mapping[str, ReplicaView]
) -> dict[str, float]:
    """Return, by replica, the fraction of adapters in use that only this replica has on GPU or
    host.

    Adapters with at least POPULAR recent requests are in use, and count alike. Those on no GPU or
    host do not count.

    demand: recent requests, a count that halves every 45 s, by digest.
    """
    holder: dict[str, str | None] = {}
    for name, replica in replicas.items():
        for digest, tier in replica.held.items():
            if tier >= Residency.HOST and demand.get(digest, 0.0) >= POPULAR:
                holder[digest] = None if digest in holder else name
    sole = Counter(holder.values())
    return {name: round(sole[name] / max(1, len(holder)), 3) for name in replicas}


class _Draft:
    """Prefetch plan under construction, with the fleet as it will be after these prefetches.

    demand: recent requests, a count that halves every 45 s, by digest, over all replicas.
    sizes: bytes of adapters on a GPU, by digest.
    replicas: replicas by name.
    """

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
        self._holders: dict[str, list[str]] = {}  # digest → replicas, on GPU or host
        self._evicted: set[str] = set()
        for name in self._names:
            self._add_replica(name, replicas[name])
        self._fillable = {
            tier: {name for name, budget in budgets.items() if budget.free_share >= _FREE_SHARE}
            for tier, budgets in self._budgets.items()
        }
        wanted = (digest for digest, uses in demand.items() if uses >= POPULAR and digest in sizes)
        self._wanted = sorted(wanted, key=lambda digest: (-demand[digest], digest))
        self._share = sum(demand.values()) / max(1, len(replicas))

    def copy_by_demand(self) -> None:
        """Plan copies on GPUs in descending order of the uses that each copy will serve."""
        queue = [copy for digest in self._wanted if (copy := self._next_copy(digest)) is not None]
        heapify(queue)
        refused = float("inf")  # size that fits nowhere: a less used adapter of that size neither
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
        """Plan copies of the most used adapters on replicas that have free space and serve less
        than their share of all uses.
        """
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
        """Plan copies until `copies` replicas have each adapter in use on GPU or host."""
        uses_to_evict = _USES_TO_EVICT if copies == 1 else 0.0  # spares are made in calm times only
        for digest in self._wanted:
            if digest in self._evicted:  # only the next reports show whether it was evicted
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
                if tier is Residency.GPU:  # the host keeps a copy too
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
        """Return the heap's entry for one more GPU copy of an adapter; None if a copy is not
        worthwhile.

        The entry is (uses that the copy would serve, negated for the heap; digest).
        """
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
                continue  # the holders would soon be underused themselves
            if self._fits(name, digest, Residency.GPU):
                self._add(name, Prefetch(digest, Residency.GPU, after), [])
                uses[name] += after
                for holder in holders:
                    uses[holder] -= less

    def _plan(
        self, digest: str, tier: Residency, uses: float, uses_to_evict: float = _USES_TO_EVICT
    ) -> bool:
        """Plan a copy of an adapter if one fits; return whether it does.

        Tries replicas that hold the adapter nearer to the GPU first, and among equals in the order
        in which routing prefers them for the adapter.

        uses: part of the adapter's recent requests that the copy is expected to serve.
        uses_to_evict: smallest `uses` for which other adapters may be evicted.
        """
        order = [
            name
            for name in preferred(digest, self._names)
            if name not in self._held_by(digest, tier)
        ]
        order.sort(key=lambda name: -self._replicas[name].held.get(digest, Residency.REMOTE))
        for name in order:
            if self._fits(name, digest, tier):
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

    def _fits(self, name: str, digest: str, tier: Residency) -> bool:
        size, fillable = self._sizes[digest], name in self._fillable[tier]
        fits = size <= self._budgets[tier][name].free_bytes
        return fillable and fits and self._may_add(name, size)

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
    """Free bytes of one tier of one replica, and the adapters that may be evicted to free more.

    Adapters are evicted in the engines' order: the adapter least used for its size first.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.free_bytes = self._capacity_bytes = capacity_bytes
        self._sizes: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._order: list[str] | None = None  # first to be evicted comes last

    @property
    def free_share(self) -> float:
        """Fraction of the tier's bytes that is free."""
        return self.free_bytes / max(1, self._capacity_bytes)

    def hold(self, digest: str, size: int, uses: float) -> None:
        """Count an adapter that the tier holds and that may be evicted.

        size: bytes of its image.
        uses: recent requests for it on this replica.
        """
        self.free_bytes -= size
        self._sizes[digest] = size
        self._scores[digest] = uses / math.sqrt(max(1, size))

    def victims(self, size: int, uses: float, loss: Callable[[str], float]) -> list[str] | None:
        """Return the adapters to evict until `size` bytes are free; None if they are used too much
        or have too few bytes.

        uses: limit on the recent requests that the evicted copies serve, all together.
        loss: returns the part of an adapter's recent requests that its copy here serves.
        """
        if self._order is None:
            self._order = sorted(self._sizes, key=lambda d: (self._scores[d], d), reverse=True)
        victims: list[str] = []
        free = max(0, self.free_bytes)  # below 0: host copies of GPU adapters may exceed the tier
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
        """Evict adapters and place an image, which later steps of this plan do not evict.

        size: bytes of the image.
        victims: digests of the adapters to evict, as the method `victims` returned them.
        """
        for digest in victims:
            self.free_bytes += self._sizes.pop(digest)
        if victims and self._order is not None:
            del self._order[-len(victims) :]
        self.free_bytes -= size
