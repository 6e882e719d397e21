"""The host arena: packed images in memory that is allocated once, pinned where there is a GPU."""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.parallel.ring import SharedMemory
from lorikeet_engine.residency.changes import OnChange, ignore_change
from lorikeet_engine.residency.checksums import LayerSums
from lorikeet_engine.residency.free_list import FreeList
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from lorikeet_engine.residency.reservations import MemoryReservations
from lorikeet_engine.telemetry.status import TierStatus


@dataclass(slots=True)
class _Image:
    """packed: the image, a view of the arena; None while it is written and once it is discarded."""

    offset: int
    layout: PackedLayout
    holders: int = 1
    packed: PackedImage | None = None


class HostArena:
    """Images by digest; the least recently held goes when room is needed. Thread-safe.

    An image is never evicted while somebody holds it: its writer, or the one who copies it.
    """

    def __init__(
        self,
        budget_bytes: int,
        dtype: torch.dtype,
        pin: bool,
        on_change: OnChange = ignore_change,
        shared: SharedMemory | None = None,
    ) -> None:
        """on_change: called with the digest of what has come here or gone.

        shared: the memory to use, of budget_bytes, where other processes read it, too.
        """
        self.elements = budget_bytes // dtype.itemsize
        self._arena = host_memory(self.elements, dtype, pin, shared)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._blocks = FreeList(self.elements)
        self._reservations = MemoryReservations(self.elements)
        self._images: dict[str, _Image] = {}  # least recently held first
        self.frees = 0  # grows whenever waiting for room may have become worthwhile
        self._evictions = self._checksum_failures = 0

    def status(self) -> TierStatus:
        """What the arena holds, images being written included, and what it has evicted."""
        elements = self.elements - self._blocks.free, self.elements, self._reservations.capacity
        used, capacity, pinnable = (each * self._arena.itemsize for each in elements)
        counted = self._evictions, self._checksum_failures
        return TierStatus(len(self._images), used, capacity, pinnable, *counted)

    def holds(self, digest: str) -> bool:
        """Whether the image is there, whole."""
        return self.image(digest) is not None

    def image(self, digest: str) -> PackedImage | None:
        """The image if it is there, whole; another object once it was loaded anew.

        Its elements are valid while somebody holds it.
        """
        image = self._images.get(digest)
        return image.packed if image is not None else None

    def digests(self) -> list[str]:
        """All images that are there or being written."""
        with self._lock:
            return list(self._images)

    def reserve(
        self, digest: str, layout: PackedLayout, *, for_request: bool
    ) -> torch.Tensor | None:
        """Reserve room for a new image, held by the caller; None while held images take it all.

        Among these may be one of the same adapter that was discarded. for_request: a request waits
        for it, so pins give way if nothing else does.
        """
        with self._lock:
            if digest in self._images:
                return None
            if for_request:
                self._reservations.revoke_for(layout.image_elements)
            offset = self._blocks.allocate(layout.image_elements)
            if offset is None:
                offset = self._evict_for(layout.image_elements, for_request)
            if offset is None:
                return None
            self._images[digest] = _Image(offset, layout)
            return self._view(self._images[digest])

    def commit(self, digest: str, sums: LayerSums) -> None:
        """Say that the image is written, and with which sums; the writer still holds it."""
        image = self._images[digest]
        image.packed = PackedImage(image.layout, self._view(image), sums)
        self._on_change(digest)

    def abandon(self, digest: str) -> None:
        """Give up an image that could not be written."""
        with self._lock:
            self._drop(digest)
            self.frees += 1

    def discard(self, digest: str) -> None:
        """Let nobody hold a damaged image any more; its room is free once nobody does."""
        with self._lock:
            image = self._images.get(digest)
            if image is None:  # evicted meanwhile, by a loading thread
                return
            self._checksum_failures += 1
            image.packed = None
            self._reservations.revoke(digest)
            if not image.holders:
                self._drop(digest)
                self.frees += 1
        self._on_change(digest)

    def hold(self, digest: str) -> PackedImage | None:
        """Keep the image where it is until release, and return it; None if it is not there."""
        with self._lock:
            image = self._images.get(digest)
            if image is None or image.packed is None:
                return None
            image.holders += 1
            self._images[digest] = self._images.pop(digest)
            return image.packed

    def release(self, digest: str) -> None:
        """Undo one hold."""
        with self._lock:
            image = self._images[digest]
            image.holders -= 1
            if image.packed is None and not image.holders:
                self._drop(digest)
            self.frees += 1

    def pin(self, digest: str) -> bool:
        """Keep the image from now on; False while it is not there or too much is pinned."""
        with self._lock:
            image = self._images.get(digest)
            if image is None or image.packed is None:
                return False
            return self._reservations.grant(digest, image.layout.image_elements)

    def unpin(self, digest: str) -> None:
        """Let the image be evicted again."""
        with self._lock:
            self._reservations.revoke(digest)
            self.frees += 1

    def _evict_for(self, elements: int, for_request: bool) -> int | None:
        """Evict until there is a hole of this size, and take it; None where there can be none.

        The engine's thread may wait for the lock meanwhile, and there may be thousands of images:
        each is looked at once.
        """
        while True:
            evictable = {
                digest: image.layout.image_elements
                for digest, image in self._images.items()
                if not image.holders and digest not in self._reservations
            }
            if self._blocks.free + sum(evictable.values()) >= elements:
                for digest in evictable:
                    self._evictions += 1
                    if self._drop(digest) >= elements:
                        return self._blocks.allocate(elements)
            # Pinned images may lie so that no hole is large enough.
            held = any(image.holders for image in self._images.values())
            if not for_request or held or not self._reservations.revoke_newest():
                return None

    def _drop(self, digest: str) -> int:
        """Forget an image; the size of the hole that is there now."""
        image = self._images.pop(digest)
        self._reservations.revoke(digest)
        hole = self._blocks.release(image.offset, image.layout.image_elements)
        self._on_change(digest)
        return hole

    def _view(self, image: _Image) -> torch.Tensor:
        return self._arena[image.offset : image.offset + image.layout.image_elements]


def host_memory(
    elements: int, dtype: torch.dtype, pin: bool, shared: SharedMemory | None
) -> torch.Tensor:
    """Memory for images, pinned in this process on request; the shared memory's where it is given.

    Without torch's pin_memory, which takes the next power of two: for 84 GB, 137 GB. Raises
    SettingsError where so much cannot be pinned.
    """
    if shared is not None and elements:
        arena = torch.frombuffer(shared.bytes, dtype=dtype, count=elements)
    else:
        arena = torch.empty(elements, dtype=dtype)
    if pin and arena.nbytes:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(arena.data_ptr(), arena.nbytes, 0))
        if status:
            raise SettingsError(
                f"adapter_host_bytes={arena.nbytes}: the host cannot pin so much memory "
                f"(CUDA error {status}); lower it"
            )
        weakref.finalize(arena, cudart.cudaHostUnregister, arena.data_ptr())
    return arena
