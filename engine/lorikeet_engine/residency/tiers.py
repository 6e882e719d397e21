"""Interface of the adapter tiers (remote → disk → host → GPU) to the engine.

The engine's thread makes all decisions here, and never waits; loading threads only bring images to
the host. `requested_adapters`, `pins` and `prefetches` each load adapters and have them placed on
the GPU, each for a LoadReason of its own.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lorikeet_engine.adapter import Adapter, AdapterRef, Composition, Residency
from lorikeet_engine.adapter_format import AdapterLimits, BaseShape
from lorikeet_engine.costs import LoadCosts
from lorikeet_engine.errors import AdapterDamaged, AdapterMissing, AdapterTooLarge
from lorikeet_engine.parallel.followers import Followers
from lorikeet_engine.residency.base_rows import BaseRows
from lorikeet_engine.residency.changes import ResidencyChanges
from lorikeet_engine.residency.disk.cache import AdapterSource, DiskCache
from lorikeet_engine.residency.disk.image_file import fingerprint
from lorikeet_engine.residency.disk.watcher import DiskWatcher
from lorikeet_engine.residency.eviction_score import LeastUsedForItsSize
from lorikeet_engine.residency.gpu.adapters import GpuAdapters, Lease, LoadReason
from lorikeet_engine.residency.gpu.arena import allocate_weights
from lorikeet_engine.residency.gpu.compositions import CompositionLease, Compositions
from lorikeet_engine.residency.gpu.image_copies import ImageCopies
from lorikeet_engine.residency.gpu.rank_arenas import arena_of
from lorikeet_engine.residency.gpu.slot_usage import SlotUsage, SlotUser
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.image_checks import ImageChecks
from lorikeet_engine.residency.loader import Loader, LoadResult
from lorikeet_engine.residency.packed_image import PackedImage
from lorikeet_engine.residency.pins import RETRY_S, Pins
from lorikeet_engine.residency.prefetches import Prefetches
from lorikeet_engine.residency.requested_adapters import RequestedAdapters
from lorikeet_engine.residency.stats import ResidencyStats
from lorikeet_engine.scheduling.border_policy import Evicted
from lorikeet_engine.telemetry.status import (
    AdapterStatus,
    Distribution,
    EvictionCandidate,
    SlotUse,
    TierStatus,
)

log = logging.getLogger(__name__)


class Tiers:
    """Manager of all tiers: keeps each adapter as near to the GPU as memory and demand allow.

    The tiers are remote, disk, host and GPU. A blob is an adapter's file; an image is the adapter
    packed for the GPU.

    For the engine's thread only: rank, loaded_at_s, request, lease, advance, take_missed_s,
    extend_arena, cut_arena and close. Any thread may call the other methods, but `moved` only one
    thread at a time.

    weights: the GPU's tensors for adapters, which stay the same as long as the engine runs.
    arena: manager of the GPU's arena, which is one of the tensors in `weights`.
    changed: event that is set when `moved` may have something to return.
    incoming_blobs: packs blobs to images while another process still writes the blobs' files.
    """

    def __init__(
        self,
        shape: BaseShape,
        limits: AdapterLimits,
        source: AdapterSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        gpu_bytes: int,
        host_bytes: int,
        disk_bytes: int,
        cache_dir: Path,
        max_slots: int,
        wake: Callable[[], None],
        world: int = 1,
        followers: Followers | None = None,
        base: BaseRows | None = None,
        arena: torch.Tensor | None = None,
    ) -> None:
        """Allocate memory for adapters on the GPU and the host.

        shape: sizes of the base model's layers, to which adapters must fit.
        limits: limits on the rank and the size of each adapter.
        source: store from which adapters' files (blobs) are downloaded.
        dtype: dtype of adapters on the GPU and the host.
        gpu_bytes, host_bytes, disk_bytes: memory for adapters in each tier. With several ranks,
            gpu_bytes is the memory on each rank's GPU.
        cache_dir: folder of the disk cache.
        max_slots: maximum number of adapters on the GPU.
        wake: called on other threads when `advance` has work.
        world: number of tensor parallel ranks that share the model.
        followers: processes of the other ranks, which repeat all operations on `arena`.
        base: reads rows of the base model's weights and biases, which are needed to pack DoRA's
            magnitudes and biases that replace the base model's; None: no adapter may have these.
        arena: bytes to use as the GPU's arena, of which the first gpu_bytes are there, and which
            extend_arena and cut_arena change; None: allocate gpu_bytes.
        """
        self._on_work, self._has_work = wake, True
        self._look_s: float | None = None  # when `advance` has work again; None: at once
        self._retry_s: float | None = None  # when the engine is to call `advance` at the latest
        wake = self._wake
        self.weights = allocate_weights(shape, gpu_bytes, max_slots, dtype, device, arena)
        self.arena = arena_of(self.weights, device, followers)
        self._to_forget = set[str]()  # digests
        self._changes = ResidencyChanges(self.residency_of)
        self.changed, note = self._changes.changed, self._changes.note
        clock, pool = time.monotonic, SlotPool(gpu_bytes // dtype.itemsize, max_slots)
        self._pool = pool
        self._gpu = GpuAdapters(pool, self.arena, LeastUsedForItsSize(), clock, note)
        self._compositions = Compositions(self._gpu, self.arena, limits.max_rank, max_slots, clock)
        shared = None if followers is None else followers.memory
        self._host = HostArena(host_bytes, dtype, device.type == "cuda", note, shared)
        kind = fingerprint(shape, limits, dtype, world)
        self._disk = DiskCache(cache_dir, disk_bytes, source, kind, note)
        self._disk_watcher = DiskWatcher(self._disk, self._changes)
        self._loader = Loader(
            shape, limits, self._disk, self._host, pool.elements, wake, world, base
        )
        self.incoming_blobs = self._loader.incoming_blobs
        self._copies, self._usage = ImageCopies(wake), SlotUsage(clock)
        self._pins = Pins(self._gpu, self._host, self._disk, self._loader, self._place)
        self._stats = ResidencyStats(
            pool, dtype.itemsize, self._gpu, self._copies, self._pins, self.residency_of
        )
        self._requests = RequestedAdapters(self._host, self._loader, self._stats, self._place, wake)
        self._prefetches = Prefetches(self._gpu, self._host, self._loader, self._place)
        self._checks = ImageChecks(
            self._gpu, pool, self.weights.arena, self._host, self._stats.ref, self.prefetch
        )

    @property
    def loading_bytes(self) -> int:
        """Total bytes of images (adapters packed for the GPU) on their way to the GPU, from any
        tier.
        """
        return self._stats.loading_bytes(self._requests.digests())

    @property
    def available_bytes(self) -> int:
        """Bytes of the GPU's arena that are free or could be freed by evictions now."""
        return self._gpu.available_elements * self.weights.arena.itemsize

    @property
    def arena_elements(self) -> int:
        """Elements of the GPU's arena that are there now."""
        return self._pool.elements

    @property
    def waits_for_gpu(self) -> bool:
        """Whether a requested adapter is on the host and waits for GPU memory."""
        return self._requests.wait_for_gpu

    def remember_evicted(self, size: int) -> None:
        """Remember adapters evicted from the GPU, up to `size` bytes, for take_missed_s."""
        self._gpu.evicted = Evicted(size // self.weights.arena.itemsize)

    def take_missed_s(self) -> float:
        """Return the seconds of loads of remembered adapters, from the host, that requests have
        needed since the last call.
        """
        missed, self._gpu.missed = self._gpu.missed, []
        if not missed:
            return 0.0
        costs, itemsize = self.load_costs(), self.weights.arena.itemsize
        return sum(costs.load_s(Residency.HOST, elements * itemsize) for elements in missed)

    def extend_arena(self, size: int) -> None:
        """Use `size` more bytes of the arena, which are there now."""
        self._gpu.extend(size // self.weights.arena.itemsize)

    def cut_arena(self, size: int) -> bool:
        """Empty the arena's last `size` bytes, and give them to no adapter from now on.

        The steps launched so far may still read them.

        Returns False if leases, guards and pins leave too little room.
        """
        return self._gpu.cut(size // self.weights.arena.itemsize)

    @property
    def victim(self) -> EvictionCandidate | None:
        """Adapter on the GPU that would be evicted first; None if none can be evicted.

        The number of uses is rounded to tenths.
        """
        return self._gpu.victim(self.weights.arena.itemsize)

    def residency(self, ref: Adapter) -> Residency:
        """Return the tier nearest to the GPU that holds an adapter now; of a composition (several
        adapters summed), the tier of its farthest adapter.
        """
        return min(self.residency_of(member.digest) for member in ref.members)

    def residency_of(self, digest: str) -> Residency:
        """Return the tier nearest to the GPU that holds the adapter with this digest now."""
        if self._gpu.holds(digest):
            return Residency.GPU
        if self._host.holds(digest):
            return Residency.HOST
        return Residency.DISK if self._disk.holds(digest) else Residency.REMOTE

    def moved(self) -> dict[str, Residency]:
        """Return the current tiers of all adapters that changed tier since the last call.

        The first call returns all adapters that are not remote.
        """
        return self._changes.moved()

    def load_costs(self) -> LoadCosts:
        """Return the measured costs of loads between tiers."""
        return self._stats.costs()

    def load_s(self, ref: Adapter) -> float:
        """Return the estimated seconds until an adapter requested now would be on the GPU.

        The time includes loads in progress. 0 for an adapter on the GPU.
        """
        costs, loading_bytes = self.load_costs(), self.loading_bytes
        tiers = (self.residency_of(member.digest) for member in ref.members)
        return sum(costs.load_s(tier, loading_bytes) for tier in tiers)

    def copy_s(self, ref: Adapter) -> float:
        """Return the estimated seconds of an adapter's copy from the host to the GPU.

        0 if the adapter was requested already, or is on the GPU.
        """
        digests = (member.digest for member in ref.members)
        return sum(
            self._stats.copy_s(digest)
            for digest in digests
            if not (digest in self._requests or self._gpu.placed(digest))
        )

    def loaded_at_s(self, ref: Adapter) -> float:
        """Return the monotonic time at which an adapter's copy to the GPU was complete.

        The adapter must be on the GPU.
        """
        return max(self._gpu.loaded_at_s(member.digest) for member in ref.members)

    def rank(self, ref: Adapter) -> int | None:
        """Return the largest LoRA rank of an adapter that is on the GPU, else None.

        The rank of a composition is the sum of its adapters' ranks.
        """
        ranks = [self._gpu.rank(member.digest) for member in ref.members]
        return sum(rank or 0 for rank in ranks) if None not in ranks else None

    def request(self, ref: Adapter, tenant: str = "") -> None:
        """Begin to load an adapter, or all adapters that a composition sums, to the GPU.

        An adapter that is there already is protected from eviction until it is leased, for at most
        GUARD_S (0.5) seconds. Further calls do not protect it longer, and do not load it twice.

        tenant: tenant whose request needs the adapter.
        """
        for member in ref.members:
            if not self._gpu.guard(member.digest):
                self._has_work = True
                self._requests.request(member, tenant)

    def lease(self, ref: Adapter, tenant: str = "") -> Lease | CompositionLease | None:
        """Lease an adapter for a tenant's request; return None until it is on the GPU.

        A leased adapter is not evicted. A composition (several adapters summed) is leased once all
        its adapters are on the GPU.

        Raises AdapterLoadFailed or AdapterTooLarge once for each failed load; the next call of
        `request` tries again. Raises AdapterNotComposable or AdapterTooLarge for a composition that
        can never be leased.
        """
        if isinstance(ref, Composition):
            return self._lease_composition(ref, tenant)
        return self._lease_one(ref, tenant)

    def advance(self) -> float | None:
        """Place loaded adapters on the GPU; begin loads for pins and prefetches.

        Other adapters are evicted as needed. To be called between two steps; does nothing in most
        of them, in which no adapter moves: only after a `wake`, while requests wait for adapters,
        and with pins every RETRY_S seconds.

        Returns the seconds after which to call again even without a `wake`; None if that is not
        needed.
        """
        self._checks.step()
        # Taken before the work: a guard that ends during it may have prevented an eviction.
        began_s = time.monotonic()
        if self._has_work or self._look_s is None or began_s >= self._look_s:
            self._has_work = False  # first: a `wake` during the work is for the next call
            self._retry_s = self._move(began_s)
            waits = self._requests.loading or self._requests.wait_for_gpu or self._to_forget
            later_s = began_s + RETRY_S if self._pins else math.inf
            look_s = later_s if self._retry_s is None else self._retry_s
            self._look_s = None if waits else look_s
        return None if self._retry_s is None else max(0.0, self._retry_s - began_s)

    def _move(self, began_s: float) -> float | None:
        """Place loaded adapters on the GPU, and begin loads. Returns the time, by the monotonic
        clock, at which to call again even without a `wake`; None if that is not needed.

        began_s: the present time.
        """
        self._take_copies()
        for result in map(self._excused, self._loader.results()):
            self._stats.on_result(result)
            self._pins.on_result(result)
            self._prefetches.on_result(result)
            self._requests.on_result(result)  # keeps or releases the image, which is held for it
        self._requests.advance()
        may_place = not self._requests.wait_for_gpu
        retry_s = self._pins.maintain(may_place=may_place)
        may_load = not self._pins.loading and not self._requests.loading
        self._prefetches.advance(may_load=may_load, may_place=may_place)
        self._to_forget -= {digest for digest in list(self._to_forget) if self._forget(digest)}
        guard_s = None if may_place else self._gpu.next_guard_end_s(began_s)
        delay_s = min((s for s in (retry_s, guard_s) if s is not None), default=None)
        return None if delay_s is None else began_s + delay_s

    def _forget(self, digest: str) -> bool:
        """Drop a transient adapter from the GPU and the host; return False while it is in use."""
        ref = self._stats.ref(digest)
        if ref is None or not ref.transient or digest in self._pins:
            return True
        if digest in self._requests or not (self._gpu.drop(digest) and self._host.drop(digest)):
            return False
        self._stats.forget(digest)
        return True

    def _excused(self, result: LoadResult) -> LoadResult:
        """Return a load's result, without the error if the store lacks the blob and only a prefetch
        needed it.

        A blob that requests or pins need is still reported as lost.
        """
        digest, error = result.ref.digest, result.error
        needed = digest in self._requests or digest in self._pins
        if needed or not isinstance(error, AdapterMissing):
            return result
        log.info("prefetch_skipped", extra={"adapter": str(result.ref), "reason": str(error)})
        return replace(result, error=None)

    def pin(self, ref: AdapterRef, tier: Residency = Residency.GPU, passing: bool = False) -> None:
        """Load an adapter up to `tier` and keep it there while enough memory remains for requests.

        passing: whether the pin is temporary, so that the adapter's image is not written to the
            disk.
        """
        self._stats.remember(ref)
        self._pins.add(ref, tier, passing)
        self._wake()

    def prefetch(self, ref: AdapterRef, tier: Residency = Residency.GPU, uses: float = 0.0) -> None:
        """Load an adapter up to `tier`, without delaying the loads of requests and pins.

        No adapter with a higher eviction score (the lowest goes first) is evicted for it. A
        prefetch is tried once, and forgotten if it fails.

        uses: number of the adapter's recent uses on other replicas that this replica could serve
            instead.
        """
        self._stats.remember(ref)
        self._prefetches.add(ref, tier, uses)
        self._wake()

    def forget(self, digest: str) -> None:
        """Drop a transient adapter (AdapterRef) from the GPU and the host once no request uses it.

        Does nothing for an adapter that is pinned or not transient.
        """
        self._to_forget.add(digest)
        self._wake()

    def unpin(self, digest: str) -> None:
        """Remove an adapter's pin, which allows its eviction again; do nothing without a pin."""
        self._pins.remove(digest)
        self._wake()

    def status(self) -> dict[Residency, TierStatus]:
        """Return contents, capacity and evictions of each tier."""
        return {
            Residency.GPU: self._gpu.status(self.weights.arena.itemsize),
            Residency.HOST: self._host.status(),
            Residency.DISK: self._disk.status(),
        }

    def loads(self) -> dict[Residency, Distribution]:
        """Return the distribution of load times, in seconds, by the tier from which adapters were
        loaded.
        """
        return self._stats.loads()

    @property
    def load_failures(self) -> int:
        """Number of loads that ended with an error."""
        return self._stats.failures

    def adapters(self, tier: Residency = Residency.DISK) -> list[AdapterStatus]:
        """Return the status of adapters on the GPU, and of remembered ones at `tier` or nearer to
        the GPU.

        A bounded number of adapters is remembered: the latest requested, pinned or prefetched.
        """
        return self._stats.adapters(tier)

    def take_use(self) -> list[SlotUse]:
        """Return tenants' use of GPU slots since the last call."""
        return self._usage.take()

    def take_damaged(self) -> dict[str, AdapterDamaged]:
        """Return an error for each adapter found damaged on the GPU since the last call.

        Keys are digests. Tokens computed with these adapters may be wrong.
        """
        return self._checks.take_damaged()

    def close(self) -> None:
        """Begin no more loads, and end the threads."""
        self._checks.close()
        self._disk_watcher.close()
        self._loader.close()
        self._copies.close()
        self._disk.close()

    def _lease_composition(self, ref: Composition, tenant: str) -> CompositionLease | None:
        self._check_size(ref)
        lease = self._compositions.lease(ref, lambda i: self._lease_one(ref.members[i], tenant))
        if lease is None:
            for member in ref.members:
                if error := self._requests.take_failure(member.digest):
                    raise error
            if self.residency(ref) is not Residency.REMOTE:  # a download may take long
                self._compositions.gather(ref)
        return lease

    def _lease_one(self, ref: AdapterRef, tenant: str) -> Lease | None:
        user = SlotUser(tenant, ref)
        lease = self._gpu.lease(ref.digest, partial(self._usage.ended, user))
        if lease is not None:
            self._usage.leased(user)
        elif error := self._requests.take_failure(ref.digest):
            raise error
        return lease

    def _check_size(self, ref: Composition) -> None:
        """Raise AdapterTooLarge if a composition's adapters do not fit on the GPU together, as far
        as their sizes are known.
        """
        elements = sum(self._stats.elements(member.digest) or 0 for member in ref.members)
        if elements > self._pool.least or len(ref.members) > self._pool.slots:
            raise AdapterTooLarge(
                f"the adapters of {ref} do not fit on the GPU together: compose fewer, or enlarge "
                "the adapter memory",
                elements=elements,
                max_elements=self._pool.least,
            )

    def _wake(self) -> None:
        """Let the engine call `advance`, which then looks for work. Any thread may call this."""
        self._has_work = True
        self._on_work()

    def _place(
        self, ref: AdapterRef, image: PackedImage, reason: LoadReason, uses: float = 0.0
    ) -> bool:
        """Copy an image to the GPU, evicting other adapters as needed.

        Returns False if not enough memory can be freed.

        image: the adapter packed for the GPU, in host memory.
        reason: reason for the copy, which decides the adapters that may be evicted.
        uses: for a prefetch, number of the adapter's recent uses on other replicas that this
            replica could serve instead.
        """
        began_s = time.perf_counter()
        copy = self._gpu.place(ref, image, reason, uses)
        if copy is None:
            return False
        digest, elements = ref.digest, image.layout.elements
        self._host.hold(digest)
        self._copies.track(digest, elements, began_s, copy)
        if user := self._requests.placed(digest):
            self._usage.loaded(user, elements * self.weights.arena.itemsize)
        self._take_copies()  # on a CPU the copy is over already
        return self._gpu.placed(digest)

    def _take_copies(self) -> None:
        for copy in self._copies.finished():
            self._stats.add_copy(copy)
            good = self._gpu.copy_finished(copy.digest, copy.total)
            damaged = None if good else self._checks.discard(copy.digest, Residency.HOST)
            self._requests.on_copy(copy.digest, damaged)
            self._host.release(copy.digest)
