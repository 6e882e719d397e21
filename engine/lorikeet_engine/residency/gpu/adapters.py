"""The adapters on the GPU: their leases, pins and eviction."""

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.changes import OnChange, ignore_change
from lorikeet_engine.residency.checksums import LayerSums, added
from lorikeet_engine.residency.eviction_score import EvictionPolicy, RecentUses, UsageRecord
from lorikeet_engine.residency.gpu.arena import DeviceArena, ReadsEnd
from lorikeet_engine.residency.gpu.image_copies import ImageCopy
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from lorikeet_engine.residency.reservations import MemoryReservations
from lorikeet_engine.scheduling.border_policy import Evicted
from lorikeet_engine.telemetry.status import EvictionCandidate, TierStatus

log = logging.getLogger(__name__)

# Guard of a requested adapter that is not leased yet. Without a guard, two waiting requests could
# evict each other's adapters forever; without its end, an aborted request would keep its memory.
GUARD_S = 0.5
# Evict up to this many times the size of the new image before moving other images. With random
# loads of ranks 4 to 256, no image moved any more, and 0.9% less of the arena was in use.
_EVICT_BEFORE_MOVING = 2


class LoadReason(Enum):
    """Reason why an adapter's packed image is placed on the GPU; it decides which adapters may be
    evicted for the image.
    """

    REQUEST = auto()  # also revokes pins if nothing else can be evicted
    PIN = auto()
    PREFETCH = auto()  # evicts only adapters with a lower score


class PlaceOnGpu(Protocol):
    """Function that copies an adapter to the GPU, as pins, prefetches and requests need it."""

    def __call__(
        self, ref: AdapterRef, image: PackedImage, reason: LoadReason, uses: float = 0.0
    ) -> bool:
        """Copy an image to the GPU, evicting other adapters as needed.

        Returns False if not enough memory can be freed.

        image: the adapter packed for the GPU, in host memory.
        reason: reason for the copy, which decides the adapters that may be evicted.
        uses: for a prefetch, number of the adapter's recent uses on other replicas that this
            replica could serve instead.
        """


@dataclass(slots=True, eq=False)
class GpuAdapter:
    """An adapter on the GPU, or being copied there.

    sums: checksums of the layers of the adapter's packed image, made when it was packed.
    score: eviction score; the adapter with the lowest is evicted first.
    last_used_s: time of the last use, by the clock of GpuAdapters.
    leases: number of sequences that use the adapter now.
    guarded_until_s: time until which the adapter is not evicted, since a request waits for it; None
        if the adapter is not guarded.
    copying: whether the copy is incomplete, so that the adapter cannot be leased yet.
    damaged: whether the adapter was found damaged, so that it cannot be leased any more.
    """

    ref: AdapterRef
    slot: int
    layout: PackedLayout
    sums: LayerSums
    last_used_s: float
    score: float
    leases: int = 0
    guarded_until_s: float | None = None
    copying: bool = True
    damaged: bool = False
    loaded_at_s: float = 0.0

    def held_at(self, now_s: float) -> bool:
        """Whether eviction is forbidden now: the adapter is leased, guarded or being copied."""
        guarded = self.guarded_until_s is not None and self.guarded_until_s > now_s
        return bool(self.leases) or self.copying or guarded


class Lease:
    """Right of a sequence to use an adapter. A leased adapter stays on the GPU and in its slot.

    Release the lease once done, or use it as a context manager.

    slot: the adapter's slot.
    rank: largest LoRA rank of the adapter.
    head_rank: LoRA rank of the adapter on lm_head.
    head_rows: number of rows of lm_head that the adapter replaces.
    changes_experts: whether linears of experts are adapted.
    has_vectors: whether linears have a gain and a bias (LoraWeights.vectors), as of DoRA.
    composed: whether this is the lease of a composition (CompositionLease), which has the same
        attributes.
    """

    composed = False
    __slots__ = (
        *("_adapter", "_ended", "_on_release"),
        *("changes_experts", "has_vectors", "head_rank", "head_rows", "rank", "slot"),
    )

    def __init__(
        self,
        adapter: GpuAdapter,
        ended: Callable[[GpuAdapter], None],
        on_release: Callable[[], None],
    ) -> None:
        """Start a lease of an adapter.

        ended: called with the adapter when the lease is released.
        on_release: the lessee's callback, called after `ended`.
        """
        adapter.leases += 1
        self._adapter: GpuAdapter | None = adapter
        self._ended, self._on_release = ended, on_release
        self.slot = adapter.slot
        self.rank = adapter.layout.max_rank
        self.head_rank = adapter.layout.head_rank
        self.head_rows = adapter.layout.head_rows
        self.changes_experts = adapter.layout.changes_experts
        self.has_vectors = adapter.layout.vectors is not None

    def release(self) -> None:
        """End the lease; a second call changes nothing."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            self._ended(adapter)
            self._on_release()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class GpuAdapters:
    """Decides which adapters are on the GPU, and leases them to sequences.

    For the engine's thread only, except holds, snapshot, available_elements and victim.

    evicted: the adapters evicted last; None where the arena's size is fixed.
    missed: sizes, in elements, of adapters in `evicted` that requests have loaded again.
    """

    def __init__(
        self,
        pool: SlotPool,
        arena: DeviceArena,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        on_change: OnChange = ignore_change,
    ) -> None:
        """Start without adapters.

        pool: computes the places of images in the arena.
        arena: the arena on the GPU.
        policy: scores adapters; the lowest score is evicted first.
        clock: returns the time in seconds.
        on_change: called with the digest of an adapter that becomes usable or unusable.
        """
        self._pool, self._arena, self._policy, self._clock = pool, arena, policy, clock
        self._adapters: dict[str, GpuAdapter] = {}
        self._by_score: list[tuple[float, str]] = []  # all adapters, lowest first
        # Superset of leased, guarded and copied adapters: few, even among thousands.
        self._held: dict[str, GpuAdapter] = {}
        self._uses = RecentUses()
        self._reservations = MemoryReservations(pool.elements)
        self._on_change = on_change
        self._evictions = self._checksum_failures = 0
        self.evicted: Evicted | None = None
        self.missed = list[int]()

    @property
    def available_elements(self) -> int:
        """Number of elements of the arena that are free or could be freed by evictions now."""
        now_s, pinned = self._clock(), self._reservations
        held = sum(
            adapter.layout.elements
            for digest, adapter in list(self._held.items())
            if digest not in pinned and adapter.held_at(now_s)
        )
        return self._pool.elements - pinned.granted - held

    def status(self, itemsize: int) -> TierStatus:
        """Return the GPU tier's status: number and bytes of its adapters, with those being copied
        there, its capacity, and its evictions since the start.

        The capacity for pins shrinks when a request asks for a larger adapter than any request
        before.

        itemsize: bytes per element.
        """
        elements = self._pool.used_elements, self._pool.elements, self._reservations.capacity
        used, capacity, pinnable = (each * itemsize for each in elements)
        counted = self._evictions, self._checksum_failures
        return TierStatus(len(self._adapters), used, capacity, pinnable, *counted)

    def victim(self, itemsize: int) -> EvictionCandidate | None:
        """Return the adapter that would be evicted first; None if none can be evicted.

        The number of uses is rounded to tenths.

        itemsize: bytes per element.
        """
        adapter = next(self._evictable(), None)
        if adapter is None:
            return None
        uses = round(self.uses(adapter.ref.digest), 1)
        return EvictionCandidate(adapter.layout.elements * itemsize, uses)

    def uses(self, digest: str) -> float:
        """Return an adapter's number of uses until now; a use's weight halves every HALF_LIFE_S
        seconds.

        The adapter need not be on the GPU.
        """
        return self._uses.count(digest, self._clock())

    def holds(self, digest: str) -> bool:
        """Whether all of an adapter's weights are on the GPU."""
        return self.usable(digest) is not None

    def usable(self, digest: str) -> GpuAdapter | None:
        """Return an adapter that can be leased now; None if it is not on the GPU, or damaged.

        Each load of the adapter makes a new object, so `is` tells whether it was reloaded.
        """
        adapter = self._adapters.get(digest)
        return adapter if adapter and not adapter.copying and not adapter.damaged else None

    def placed(self, digest: str) -> bool:
        """Whether an adapter is on the GPU or being copied there."""
        return digest in self._adapters

    def rank(self, digest: str) -> int | None:
        """Return an adapter's largest LoRA rank if it is on the GPU or being copied there, else
        None.
        """
        adapter = self._adapters.get(digest)
        return adapter.layout.max_rank if adapter is not None else None

    def loaded_at_s(self, digest: str) -> float:
        """Return the time at which an adapter's copy to the GPU was complete, by the constructor's
        `clock`.
        """
        return self._adapters[digest].loaded_at_s

    def snapshot(self) -> list[GpuAdapter]:
        """Return all adapters on the GPU, including those being copied there."""
        return list(self._adapters.values())

    def guard(self, digest: str) -> bool:
        """Protect an adapter from eviction until it is leased, but at most for GUARD_S seconds.

        Returns False if the adapter is neither on the GPU nor being copied there.
        """
        adapter = self._adapters.get(digest)
        # Never extended: a request that waits for something else must not hold memory as well.
        if adapter is not None and adapter.guarded_until_s is None:
            adapter.guarded_until_s = self._clock() + GUARD_S
            self._held[digest] = adapter
        return adapter is not None

    def guard_until(self, digest: str, end_s: float) -> None:
        """Protect an adapter from eviction until a time, if it is on the GPU."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            adapter.guarded_until_s = end_s
            self._held[digest] = adapter

    def lease(self, digest: str, on_release: Callable[[], None] = lambda: None) -> Lease | None:
        """Lease an adapter; return None if it cannot be leased now.

        Nothing is copied or moved. The lease counts as a use for the eviction score
        (eviction_score.py).

        on_release: called when the lease ends.
        """
        adapter, now_s = self.usable(digest), self._clock()
        if adapter is None:
            return None
        self._take_out(adapter)
        adapter.score = self._score(digest, adapter.layout, now_s)
        self._sort_in(adapter)
        self._uses.add(digest, now_s)
        adapter.last_used_s = now_s
        adapter.guarded_until_s = None
        self._held[digest] = adapter
        return Lease(adapter, self._lease_ended, on_release)

    def evict_for(self, elements: int, *, for_request: bool, below: float = math.inf) -> bool:
        """Evict adapters until a packed adapter of this size fits into the GPU's arena.

        Returns False, and evicts none, if evictions cannot free enough memory.

        for_request: whether a request waits for the image. If so, pins are revoked if it does not
            fit otherwise.
        below: evict only adapters with an eviction score lower than this.
        """
        if for_request:
            self._reservations.revoke_for(elements)
        if self._pool.can_place(elements):
            return True
        victims, free = list[GpuAdapter](), self._pool.elements - self._pool.used_elements
        for adapter in self._evictable(below):
            victims.append(adapter)
            free += adapter.layout.elements
            if free >= elements:
                break
        if not victims or free < elements:
            return False
        for adapter in victims:
            self._evict(adapter)
        return True

    def extend(self, elements: int) -> None:
        """Add elements to the arena's end."""
        self._pool.extend(elements)

    def cut(self, elements: int) -> bool:
        """Take elements from the arena's end: evict adapters, and move the images that lie there.

        Returns False, takes none and evicts none, if leased, guarded and pinned adapters leave too
        little room, if the arena would become smaller than at the start, or while an adapter is
        being copied.
        """
        pool = self._pool
        copying = any(adapter.copying for adapter in self._held.values())
        if copying or pool.elements - elements < pool.least:
            return False
        command = pool.cut(elements)
        victims = iter(self._victims_of_cut(elements) if command is None else ())
        while command is None:
            victim = next(victims, None)
            if victim is None:
                return False
            self._evict(victim)
            command = pool.cut(elements)
        if command.moves:
            self._arena.run(command)
        return True

    def place(
        self, ref: AdapterRef, image: PackedImage, reason: LoadReason, uses: float = 0.0
    ) -> ImageCopy | None:
        """Begin to copy an adapter's packed image to the GPU, evicting other adapters as needed.

        Returns None if not enough memory can be freed. The adapter can be leased after
        `copy_finished`.

        reason: reason for the copy, which decides the adapters that may be evicted.
        uses: for a prefetch, number of the adapter's recent uses on other replicas that this
            replica could serve instead.
        """
        layout, digest, requested = image.layout, ref.digest, reason is LoadReason.REQUEST
        assert digest not in self._adapters
        score = below = math.inf
        if reason is LoadReason.PREFETCH:
            score = below = self._prefetch_score(digest, layout, uses)
        if not self.evict_for(layout.elements, for_request=requested, below=below):
            return None
        self._evict_rather_than_move(layout, below)
        now_s = self._clock()
        placement = self._pool.place(layout)
        self._arena.run(*placement.commands)
        copy = self._arena.copy(image.elements, placement.pieces)
        if reason is not LoadReason.PREFETCH:
            score = self._score(digest, layout, now_s)
        adapter = GpuAdapter(ref, placement.slot, layout, image.sums, now_s, score)
        self._adapters[digest] = self._held[digest] = adapter
        self._sort_in(adapter)
        if requested:
            self.guard(digest)
            if self.evicted is not None and (elements := self.evicted.remove(digest)):
                self.missed.append(elements)
        facts = {"adapter": str(ref), "slot": adapter.slot, "requested": requested}
        log.info("adapter_admitted", extra=facts)
        return copy

    def copy_finished(self, digest: str, total: int) -> bool:
        """Allow leases of an adapter whose copy to the GPU is complete.

        If the copy is damaged, evict the adapter instead, and return False.

        total: checksum of the image as it arrived on the GPU.
        """
        adapter = self._adapters[digest]
        adapter.copying, adapter.loaded_at_s = False, self._clock()
        self._unhold(adapter)
        if total != added(adapter.sums):
            self._evict(adapter)
            return False
        self._on_change(digest)
        return True

    def discard(self, digest: str) -> None:
        """Allow no more leases of a damaged adapter; evict it when its last lease ends."""
        adapter = self._adapters[digest]
        adapter.damaged = True
        self._checksum_failures += 1
        if adapter.leases:
            self._on_change(digest)
        else:
            self._evict(adapter)

    def drop(self, digest: str) -> bool:
        """Free an adapter's memory, if it is on the GPU, even if it is guarded.

        Returns False, and frees nothing, while the adapter is leased or being copied. It must not
        be pinned.
        """
        adapter = self._adapters.get(digest)
        if adapter is not None and (adapter.leases or adapter.copying):
            return False
        if adapter is not None:
            self._remove(adapter)
        return True

    def is_pinned(self, digest: str) -> bool:
        """Whether an adapter is on the GPU and pinned."""
        return digest in self._reservations and digest in self._adapters

    def may_pin(self, elements: int) -> bool:
        """Whether another adapter of this size could be pinned to the GPU."""
        return len(self._reservations) + 1 < self._pool.slots and self._reservations.can_grant(
            elements
        )

    def pin(self, digest: str) -> bool:
        """Pin an adapter on the GPU: keep it there until `unpin`, or until a request needs the
        memory.

        Returns False if the memory for pins is used up.
        """
        elements = self._adapters[digest].layout.elements
        if digest not in self._reservations and not self.may_pin(elements):
            return False
        return self._reservations.grant(digest, elements)

    def unpin(self, digest: str) -> None:
        """Remove an adapter's pin, so that it may be evicted."""
        self._reservations.revoke(digest)

    def next_guard_end_s(self, after_s: float) -> float | None:
        """Return how many seconds from now the next guard (protection from eviction) ends.

        Returns None if no guard ends after `after_s`.

        after_s: guards that end at or before this time of `clock` are ignored.
        """
        guards = (adapter.guarded_until_s for adapter in self._adapters.values())
        ends = [end_s for end_s in guards if end_s is not None and end_s > after_s]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def _lease_ended(self, adapter: GpuAdapter) -> None:
        adapter.leases -= 1
        adapter.last_used_s = self._clock()
        if not adapter.leases:
            self._arena.run(ReadsEnd(adapter.slot))
            self._unhold(adapter)
            if adapter.damaged:
                self._evict(adapter)

    def _unhold(self, adapter: GpuAdapter) -> None:
        if not adapter.leases and adapter.guarded_until_s is None:
            self._held.pop(adapter.ref.digest, None)

    def _evictable(self, below: float = math.inf) -> Iterator[GpuAdapter]:
        """Yield adapters that may be evicted, lowest score first.

        Do not evict any while iterating.

        Threads other than the engine's may call this, but the adapters may have changed meanwhile.

        below: only adapters with a score lower than this are yielded.
        """
        now_s = self._clock()
        for score, digest in self._by_score:
            if score >= below:
                return
            adapter = self._adapters.get(digest)
            if adapter and digest not in self._reservations and not adapter.held_at(now_s):
                yield adapter

    def _victims_of_cut(self, elements: int) -> list[GpuAdapter]:
        """Return adapters whose eviction lets the arena's end be cut; [] if no eviction does.

        They are those with the lowest scores, and if that does not suffice those that lie there.
        """
        pool, victims = self._pool, list[GpuAdapter]()
        left = pool.used_elements - pool.elements + (1 + _EVICT_BEFORE_MOVING) * elements
        evictable = list(self._evictable())
        for adapter in evictable:
            if left <= 0:
                break
            victims.append(adapter)
            left -= adapter.layout.elements
        if pool.could_cut(elements, {adapter.slot for adapter in victims}):
            return victims
        behind = pool.behind(elements) - {adapter.slot for adapter in victims}
        victims += [adapter for adapter in evictable if adapter.slot in behind]
        return victims if pool.could_cut(elements, {adapter.slot for adapter in victims}) else []

    def _evict_rather_than_move(self, layout: PackedLayout, below: float) -> None:
        """Evict adapters until an image fits without moving other images, because moves delay
        steps.

        Gives up once the evicted adapters add up to _EVICT_BEFORE_MOVING times the image's size.

        below: evict only adapters with a score lower than this.
        """
        left = _EVICT_BEFORE_MOVING * layout.elements
        while left > 0 and not self._pool.fits(layout):
            adapter = next(self._evictable(below), None)
            if adapter is None:
                return
            left -= adapter.layout.elements
            self._evict(adapter)

    def _score(self, digest: str, layout: PackedLayout, now_s: float) -> float:
        """Return the eviction score that an adapter gets if it is used now."""
        uses = self._uses.count(digest, now_s) + 1.0
        return self._policy.score(UsageRecord(layout.elements, uses, now_s))

    def _prefetch_score(self, digest: str, layout: PackedLayout, elsewhere: float) -> float:
        """Return the eviction score of an adapter that no request waits for: a prefetched one.

        The score is −∞ if the adapter was never used on any replica.

        elsewhere: number of the adapter's recent uses on other replicas that this replica could
            serve instead.
        """
        uses, now_s = max(self.uses(digest), elsewhere), self._clock()
        return self._policy.score(UsageRecord(layout.elements, uses, now_s)) if uses else -math.inf

    def _sort_in(self, adapter: GpuAdapter) -> None:
        insort(self._by_score, (adapter.score, adapter.ref.digest))

    def _take_out(self, adapter: GpuAdapter) -> None:
        del self._by_score[bisect_left(self._by_score, (adapter.score, adapter.ref.digest))]

    def _evict(self, adapter: GpuAdapter) -> None:
        self._evictions += 1
        if self.evicted is not None:
            self.evicted.add(adapter.ref.digest, adapter.layout.elements)
        self._remove(adapter)
        idle_s = self._clock() - adapter.last_used_s
        log.info("adapter_evicted", extra={"adapter": str(adapter.ref), "idle_s": idle_s})

    def _remove(self, adapter: GpuAdapter) -> None:
        digest = adapter.ref.digest
        del self._adapters[digest]
        self._held.pop(digest, None)
        self._take_out(adapter)
        self._on_change(digest)
        self._arena.run(self._pool.free(adapter.slot))
