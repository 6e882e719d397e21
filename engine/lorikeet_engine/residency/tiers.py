"""Where adapters are, and how they move: remote → disk → host → GPU.

The engine's thread decides everything here and never waits: loading threads only bring images to
the host and leave word. One adapter's way:

    want ──▶ loading ──▶ in line, its image held on the host ──▶ on the GPU ──▶ lease
                │                    ▲
                └──▶ parked ─────────┘   while the host has no room
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits, BaseShape
from lorikeet_engine.costs import LoadCosts
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.disk.cache import AdapterSource, DiskCache
from lorikeet_engine.residency.disk.changes import DiskChanges
from lorikeet_engine.residency.disk.image_file import fingerprint
from lorikeet_engine.residency.eviction import LeastUsedForItsSize
from lorikeet_engine.residency.gpu.arena import DeviceArena
from lorikeet_engine.residency.gpu.resident import Lease
from lorikeet_engine.residency.gpu.residents import Residents
from lorikeet_engine.residency.gpu.slot_usage import SlotHold, SlotUsage
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.gpu.transfers import Copied, Transfers
from lorikeet_engine.residency.host import HostArena
from lorikeet_engine.residency.journal import Journal
from lorikeet_engine.residency.loader import Loader, LoadResult
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.residency.pins import Pins
from lorikeet_engine.residency.prefetches import Prefetches
from lorikeet_engine.residency.status import ResidencyStatus
from lorikeet_engine.telemetry.status import (
    AdapterStatus,
    Distribution,
    SlotUse,
    TierStatus,
    Victim,
)

log = logging.getLogger(__name__)

# A failure that nobody has asked about for so long says little about the next attempt.
_FAILURE_LASTS_S = 30.0


class _Failure(NamedTuple):
    """Why an adapter cannot be had, and since when."""

    error: AdapterError
    at_s: float


class Tiers:
    """Keeps adapters as near to the GPU as memory and demand allow.

    rank, here_since_s, want, lease, advance and close belong to the engine's thread; the rest may
    be called from any, `moved` by one at a time.
    weights: the arena and its table, the same tensors for the engine's life.
    noted: set when `moved` may have something to say.
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
    ) -> None:
        """Allocate both arenas. `wake` is called, on other threads, when advance has work."""
        self.weights = LoraWeights(
            torch.zeros(gpu_bytes // dtype.itemsize, dtype=dtype, device=device),
            torch.zeros(
                (max_slots, shape.layers, len(shape.linears), 3), dtype=torch.int64, device=device
            ),
        )
        self._journal = Journal(self.where)
        self.noted, note = self._journal.noted, self._journal.note
        self._pool = SlotPool(self.weights.arena.numel(), max_slots)
        self._arena = DeviceArena(self.weights, device)
        self._residents = Residents(
            self._pool, self._arena, LeastUsedForItsSize(), time.monotonic, note
        )
        self._host = HostArena(host_bytes, dtype, device.type == "cuda", note)
        kind = fingerprint(shape, limits, dtype)
        self._disk = DiskCache(cache_dir, disk_bytes, source, kind, note)
        self._loader = Loader(shape, limits, self._disk, self._host, self._pool.elements, wake)
        self._pins = Pins(self._residents, self._host, self._disk, self._loader, self._place)
        self._prefetches = Prefetches(self._residents, self._host, self._loader, self._place_spare)
        self._copies = Transfers(wake)
        self._accounts = ResidencyStatus(
            self._pool, dtype.itemsize, self._residents, self._copies, self._pins, self.where
        )
        self._wake = wake
        self._usage = SlotUsage(time.monotonic)
        self._wanted: dict[str, SlotHold] = {}  # wanted and not on the GPU, and who did first
        self._line: dict[str, AdapterRef] = {}  # of these, held on the host
        self._parked: dict[str, int] = {}  # of these, waiting for the host: its frees then
        self._failures: dict[str, _Failure] = {}
        self._watch = DiskChanges(self._disk, self._journal)

    @property
    def loading_bytes(self) -> int:
        """Images on their way to the GPU, wherever they are."""
        return self._accounts.loading_bytes(list(self._wanted))

    @property
    def room_bytes(self) -> int:
        """Bytes of the device's arena that are free or could be evicted now."""
        return self._residents.room_elements * self.weights.arena.itemsize

    @property
    def victim(self) -> Victim | None:
        """What would be evicted first, its uses to a tenth: they fade all the time."""
        return self._residents.victim(self.weights.arena.itemsize)

    def residency(self, ref: AdapterRef) -> Residency:
        """The fastest place that holds the adapter now."""
        return self.where(ref.digest)

    def where(self, digest: str) -> Residency:
        """The fastest place that holds the adapter now."""
        if self._residents.holds(digest):
            return Residency.GPU
        if self._host.holds(digest):
            return Residency.HOST
        return Residency.DISK if self._disk.holds(digest) else Residency.REMOTE

    def moved(self) -> dict[str, Residency]:
        """Where adapters are that were elsewhere at the last call, or remote at the first."""
        return self._journal.moved()

    def load_costs(self) -> LoadCosts:
        """As far as they were measured."""
        return self._accounts.costs()

    def load_s(self, ref: AdapterRef) -> float:
        """How long it may take until it is on the GPU, behind all that is on its way; 0 there."""
        return self.load_costs().load_s(self.residency(ref), self.loading_bytes)

    def copy_s(self, ref: AdapterRef) -> float:
        """How long its copy to the GPU takes if nobody has wanted it there so far, else 0."""
        if ref.digest in self._wanted or self._residents.placed(ref.digest):
            return 0.0
        return self._accounts.copy_s(ref.digest)

    def here_since_s(self, ref: AdapterRef) -> float:
        """When it came to the GPU, where it is."""
        return self._residents.since_s(ref.digest)

    def rank(self, ref: AdapterRef) -> int | None:
        """Its largest rank while it is on the GPU."""
        return self._residents.rank(ref.digest)

    def want(self, ref: AdapterRef, tenant: str = "") -> None:
        """Begin to bring it to the GPU; doing so again changes nothing. tenant: whose request."""
        digest = ref.digest
        if self._residents.want(digest) or digest in self._wanted:
            return
        failure = self._failures.get(digest)
        if failure is not None:
            if time.monotonic() - failure.at_s < _FAILURE_LASTS_S:
                return
            del self._failures[digest]
        self._accounts.asked(ref)
        self._wanted[digest] = SlotHold(tenant, ref)
        self._bring(ref)

    def lease(self, ref: AdapterRef, tenant: str = "") -> Lease | None:
        """A lease for a tenant's request once it is on the GPU, else None.

        Raises AdapterLoadFailed or AdapterTooLarge, once for each failed load: wanted again, it
        is tried again.
        """
        failure = self._failures.pop(ref.digest, None)
        if failure is not None:
            raise failure.error
        use = SlotHold(tenant, ref)
        lease = self._residents.lease(ref.digest, partial(self._usage.ended, use))
        if lease is not None:
            self._usage.leased(use)
        return lease

    def advance(self) -> float | None:
        """Between two steps: move what is loaded to the GPU, evict for it, look after pins.

        Returns after how many seconds there is more to do though nothing calls `wake`, if so.
        """
        for copied in self._copies.over():
            self._arrive(copied)
        for landing in self._loader.landings():
            self._receive(landing)
        began_s = time.monotonic()  # a guard that ends during what follows may have been in its way
        self._admit()
        for digest, frees in list(self._parked.items()):
            if self._host.frees != frees:
                del self._parked[digest]
                self._bring(self._wanted[digest].ref)
        retry_s = self._pins.keep(may_place=not self._line)
        spare = not self._pins.loading and len(self._wanted) == len(self._line)
        self._prefetches.advance(may_load=spare, may_place=not self._line)
        guard_s = self._residents.guarded_for_s(began_s) if self._line else None
        return min((s for s in (retry_s, guard_s) if s is not None), default=None)

    def pin(self, ref: AdapterRef, tier: Residency = Residency.GPU) -> None:
        """Load it up to `tier` and never evict it below, as long as room for others is left."""
        self._accounts.asked(ref)
        self._pins.ask(ref, tier)
        self._wake()

    def prefetch(self, ref: AdapterRef, tier: Residency = Residency.GPU, uses: float = 0.0) -> None:
        """Bring it up to `tier` if that takes nothing from requests, pins or what is worth more.

        uses: of late by other replicas, as far as this one could serve them. Tried once, and
        forgotten where it cannot be.
        """
        self._accounts.asked(ref)
        self._prefetches.ask(ref, tier, uses)
        self._wake()

    def unpin(self, digest: str) -> None:
        """Let it be evicted again; nothing happens without a pin."""
        self._pins.cancel(digest)
        self._wake()

    def status(self) -> dict[Residency, TierStatus]:
        """What each tier holds, has room for, and evicted."""
        return {
            Residency.GPU: self._residents.status(self.weights.arena.itemsize),
            Residency.HOST: self._host.status(),
            Residency.DISK: self._disk.status(),
        }

    def loads(self) -> dict[Residency, Distribution]:
        """What loads took, by the tier that they were from."""
        return self._accounts.loads()

    @property
    def load_failures(self) -> int:
        """Loads that ended with an error."""
        return self._accounts.failures

    def adapters(self, tier: Residency = Residency.DISK) -> list[AdapterStatus]:
        """What lies in the arena, and what else this process has seen that is at `tier` or nearer.

        Takes microseconds for each.
        """
        return self._accounts.adapters(tier)

    def take_use(self) -> list[SlotUse]:
        """Who used slots since the call before."""
        return self._usage.take()

    def close(self) -> None:
        """Load nothing more."""
        self._watch.close()
        self._loader.close()
        self._copies.close()
        self._disk.close()

    def _bring(self, ref: AdapterRef) -> None:
        held = self._host.hold(ref.digest)
        if held is not None:
            self._accounts.seen(ref.digest, held.layout.elements)
            self._line[ref.digest] = ref
            self._wake()  # advance has work, and nothing is loading that would say so
        else:
            self._loader.load(ref, Residency.HOST, urgent=True)

    def _receive(self, landing: LoadResult) -> None:
        ref, digest = landing.ref, landing.ref.digest
        self._pins.landed(landing)
        self._prefetches.landed(landing)
        self._accounts.landed(landing)
        if landing.error is not None:
            log.warning("adapter_failed", extra={"adapter": str(ref), "error": str(landing.error)})
            if self._wanted.pop(digest, None):
                self._failures[digest] = _Failure(landing.error, time.monotonic())
        elif landing.residency is Residency.HOST:
            if digest in self._wanted and digest not in self._line:
                self._line[digest] = ref
            else:
                self._host.release(digest)
        elif digest in self._wanted:
            self._parked[digest] = landing.frees

    def _admit(self) -> None:
        refused = self._pool.elements + 1  # what had no room has none later in the same step
        for digest, ref in list(self._line.items()):
            held = self._host.hold(digest)
            assert held is not None
            layout, image = held
            if layout.elements < refused and not self._place(ref, layout, image, wanted=True):
                refused = layout.elements
            self._host.release(digest)

    def _place(
        self,
        ref: AdapterRef,
        layout: PackedLayout,
        image: torch.Tensor,
        *,
        wanted: bool = False,
        worth: float | None = None,
    ) -> bool:
        below = math.inf if worth is None else worth
        if not self._residents.make_room(layout.elements, insist=wanted, below=below):
            return False
        digest, began_s = ref.digest, time.perf_counter()
        copied = self._residents.place(ref, layout, image, wanted=wanted, worth=worth)
        if copied is None:
            took_s = time.perf_counter() - began_s
            self._accounts.copied(Copied(digest, layout.elements, took_s))
        else:
            self._host.hold(digest)
            self._copies.follow(digest, layout.elements, began_s, copied)
        if use := self._wanted.pop(digest, None):
            self._usage.loaded(use, layout.elements * self.weights.arena.itemsize)
        self._parked.pop(digest, None)
        self._failures.pop(digest, None)  # of an earlier load that nobody waits for any more
        if self._line.pop(digest, None):
            self._host.release(digest)
        return True

    def _place_spare(
        self, ref: AdapterRef, layout: PackedLayout, image: torch.Tensor, uses: float
    ) -> bool:
        """Where nobody misses the room, and for no more than its uses so far."""
        worth = self._residents.worth_unasked(ref.digest, layout, uses)
        return self._place(ref, layout, image, worth=worth)

    def _arrive(self, copied: Copied) -> None:
        self._accounts.copied(copied)
        self._residents.arrived(copied.digest)
        self._host.release(copied.digest)
