"""Pins: adapters to load to a tier and to keep there, whether or not requests use them."""

import time
from collections import deque
from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.gpu.adapters import GpuAdapters, LoadReason, PlaceOnGpu
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.loader import Loader, LoadResult
from lorikeet_engine.residency.packed_image import PackedImage

RETRY_S = 5.0
# Concurrent loads for pins: requests' loads need threads, too.
_LOADS = 2


@dataclass(slots=True)
class _Pin:
    ref: AdapterRef
    tier: Residency
    passing: bool
    retry_at_s: float = 0.0


class Pins:
    """The pinned adapters, each to be kept in its pin's tier or nearer to the GPU. For the engine's
    thread only, except add, remove and `in`.
    """

    def __init__(
        self,
        gpu: GpuAdapters,
        host: HostArena,
        disk: DiskCache,
        loader: Loader,
        place: PlaceOnGpu,
    ) -> None:
        self._gpu, self._host, self._disk = gpu, host, disk
        self._loader, self._place = loader, place
        self._updates: deque[tuple[str, _Pin | None]] = deque()
        self._pins: dict[str, _Pin] = {}
        self._loading: set[str] = set()
        self._due_s = 0.0
        self._unmet = False

    def __contains__(self, digest: str) -> bool:
        return digest in self._pins

    def __bool__(self) -> bool:
        """Whether any adapter is pinned."""
        return bool(self._pins)

    @property
    def loading(self) -> bool:
        """Whether an adapter is being loaded for a pin."""
        return bool(self._loading)

    def add(self, ref: AdapterRef, tier: Residency, passing: bool = False) -> None:
        """Pin an adapter to a tier: from the next `maintain` on, keep it there or nearer the GPU.

        passing: whether the pin is temporary. Then the adapter's image is not written to the disk,
            but its safetensors file is pinned on the disk in addition, since the store to download
            from may not have it.
        """
        self._updates.append((ref.digest, _Pin(ref, tier, passing)))

    def remove(self, digest: str) -> None:
        """Remove an adapter's pin, at the next `maintain`."""
        self._updates.append((digest, None))

    def on_result(self, result: LoadResult) -> None:
        """Note that a load has ended, so that the next `maintain` looks at all pins."""
        digest = result.ref.digest
        self._loading.discard(digest)
        self._due_s = 0.0
        pin = self._pins.get(digest)
        if pin is not None and result.residency < min(pin.tier, Residency.HOST):
            pin.retry_at_s = time.monotonic() + RETRY_S

    def maintain(self, *, may_place: bool) -> float | None:
        """Load or place pinned adapters that are not in their pins' tiers yet.

        Returns the seconds after which to call again; None when all pinned adapters are in their
        tiers.

        may_place: whether to place adapters on the GPU; False while requests wait for GPU memory.
        """
        while self._updates:
            self._apply(*self._updates.popleft())
        now_s = time.monotonic()
        if now_s < self._due_s:
            return self._due_s - now_s if self._unmet else None
        self._due_s = now_s + RETRY_S
        unmet = [pin for pin in self._pins.values() if not self._is_met(pin)]
        for pin in unmet:
            if now_s >= pin.retry_at_s and not self._promote(pin, may_place):
                pin.retry_at_s = now_s + RETRY_S
        self._unmet = bool(unmet)
        return RETRY_S if unmet else None

    def _apply(self, digest: str, pin: _Pin | None) -> None:
        self._due_s = 0.0
        for tier in (self._gpu, self._host, self._disk):
            tier.unpin(digest)
        if pin is None:
            self._pins.pop(digest, None)
        else:
            self._pins[digest] = pin
            if pin.passing:
                self._disk.pin(digest)

    def _is_met(self, pin: _Pin) -> bool:
        match pin.tier:
            case Residency.GPU:
                return self._gpu.is_pinned(pin.ref.digest)
            case Residency.HOST:
                return self._host.pin(pin.ref.digest)
            case Residency.DISK:
                return self._disk.pin(pin.ref.digest)
            case Residency.REMOTE:
                return True

    def _promote(self, pin: _Pin, may_place: bool) -> bool:
        """Move a pinned adapter towards its tier; return False if that is impossible now."""
        digest = pin.ref.digest
        if pin.tier is Residency.GPU and self._gpu.placed(digest):
            return self._gpu.pin(digest)
        held = self._host.hold(digest)
        if held is None:
            if pin.tier is Residency.DISK and self._disk.holds(digest):
                return False
            return self._load(pin)
        try:
            return pin.tier is Residency.GPU and may_place and self._to_gpu(pin.ref, held)
        finally:
            self._host.release(digest)

    def _load(self, pin: _Pin) -> bool:
        if pin.ref.digest in self._loading or len(self._loading) < _LOADS:
            self._loading.add(pin.ref.digest)
            tier = min(pin.tier, Residency.HOST)
            self._loader.load(pin.ref, tier, urgent=False, passing=pin.passing)
        return True

    def _to_gpu(self, ref: AdapterRef, image: PackedImage) -> bool:
        # Checked first, so that nothing is evicted in vain.
        if not self._gpu.may_pin(image.layout.elements):
            return False
        return self._place(ref, image, LoadReason.PIN) and self._gpu.pin(ref.digest)
