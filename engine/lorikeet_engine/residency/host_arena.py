"""The host arena: packed images in one block of memory, page-locked if there is a GPU."""

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
    """Packed adapter (image) in the host arena, or memory reserved for one.

    offset: element of the arena at which the image begins.
    packed: the image as a view of the arena; None while it is written, and once it is discarded.
    holders: number of writers and readers that keep the image in place.
    """

    offset: int
    layout: PackedLayout
    holders: int = 1
    packed: PackedImage | None = None


class HostArena:
    """Images (adapters packed for the GPU) in host memory, by digest. Thread-safe.

    A new image evicts the images that were held least recently. An image is held while it is
    written, or copied to the GPU or the disk; a held image is never evicted.
    """

    def __init__(
        self,
        budget_bytes: int,
        dtype: torch.dtype,
        pin: bool,
        on_change: OnChange = ignore_change,
        shared: SharedMemory | None = None,
    ) -> None:
        """Allocate the arena.

        budget_bytes: size of the arena.
        pin: whether to page-lock the memory.
        on_change: called with the digest of an adapter that the arena has gained or lost.
        shared: memory of budget_bytes that other processes read, to use instead of private memory.
        """
        self.elements = budget_bytes // dtype.itemsize
        self._arena = host_memory(self.elements, dtype, pin, shared)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._blocks = FreeList(self.elements)
        self._reservations = MemoryReservations(self.elements)
        self._images: dict[str, _Image] = {}  # least recently held first
        self.frees = 0  # grows whenever a failed `reserve` may succeed
        self._evictions = self._checksum_failures = 0

    def status(self) -> TierStatus:
        """Return host memory's status: number and bytes of packed adapters, with those being
        written, its capacity, and its evictions since the start.
        """
        elements = self.elements - self._blocks.free, self.elements, self._reservations.capacity
        used, capacity, pinnable = (each * self._arena.itemsize for each in elements)
        counted = self._evictions, self._checksum_failures
        return TierStatus(len(self._images), used, capacity, pinnable, *counted)

    def holds(self, digest: str) -> bool:
        """Whether host memory has an adapter's complete image."""
        return self.image(digest) is not None

    def image(self, digest: str) -> PackedImage | None:
        """Return an adapter's packed image if it is complete, else None.

        The image's data is valid only while someone holds the image.
        """
        image = self._images.get(digest)
        return image.packed if image is not None else None

    def digests(self) -> list[str]:
        """Return the digests of all adapters whose images are in host memory, including those being
        written.
        """
        with self._lock:
            return list(self._images)

    def reserve(
        self, digest: str, layout: PackedLayout, *, for_request: bool
    ) -> torch.Tensor | None:
        """Allocate memory for an adapter's new packed image, which the caller holds until
        `release`.

        Returns None if not enough memory can be freed, or while a discarded image of the same
        adapter is still held.

        for_request: whether a request waits for the image. If so, pins are revoked if it does not
            fit otherwise.
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
        """Mark an adapter's packed image as completely written; the writer still holds it.

        sums: checksums of the image's layers.
        """
        image = self._images[digest]
        image.packed = PackedImage(image.layout, self._view(image), sums)
        self._on_change(digest)

    def abandon(self, digest: str) -> None:
        """Free the memory reserved for an adapter's packed image whose writing failed."""
        with self._lock:
            self._drop(digest)
            self.frees += 1

    def discard(self, digest: str) -> None:
        """Allow no more use of an adapter's damaged image. Its memory is freed once nobody holds
        it.
        """
        with self._lock:
            image = self._images.get(digest)
            if image is None:  # a loading thread has evicted it meanwhile
                return
            self._checksum_failures += 1
            image.packed = None
            self._reservations.revoke(digest)
            if not image.holders:
                self._drop(digest)
                self.frees += 1
        self._on_change(digest)

    def drop(self, digest: str) -> bool:
        """Free the memory of an adapter's image, if there is one, even if it is pinned.

        Returns False, and frees nothing, while the image is held.
        """
        with self._lock:
            image = self._images.get(digest)
            if image is not None and image.holders:
                return False
            if image is not None:
                self._drop(digest)
                self.frees += 1
            return True

    def hold(self, digest: str) -> PackedImage | None:
        """Keep an adapter's packed image in place until `release`, and return it.

        Returns None if host memory does not have the complete image.
        """
        with self._lock:
            image = self._images.get(digest)
            if image is None or image.packed is None:
                return None
            image.holders += 1
            self._images[digest] = self._images.pop(digest)
            return image.packed

    def release(self, digest: str) -> None:
        """End one hold on an adapter's image, begun by `hold` or `reserve`."""
        with self._lock:
            image = self._images[digest]
            image.holders -= 1
            if image.packed is None and not image.holders:
                self._drop(digest)
            self.frees += 1

    def pin(self, digest: str) -> bool:
        """Pin an adapter's packed image: keep it in host memory until `unpin`, or until a request
        needs the memory.

        Returns False if host memory has no such image, or if the memory for pins is used up.
        """
        with self._lock:
            image = self._images.get(digest)
            if image is None or image.packed is None:
                return False
            return self._reservations.grant(digest, image.layout.image_elements)

    def unpin(self, digest: str) -> None:
        """Remove the pin of an adapter's image, so that it may be evicted."""
        with self._lock:
            self._reservations.revoke(digest)
            self.frees += 1

    def _evict_for(self, elements: int, for_request: bool) -> int | None:
        """Evict adapters' images until one of this size fits, and allocate a block for it.

        Returns the block's offset, or None if not enough memory can be freed.

        for_request: whether a request waits for the image. If so, pins are revoked if it does not
            fit otherwise.
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
            # Enough memory may be free, but split by pinned images.
            held = any(image.holders for image in self._images.values())
            if not for_request or held or not self._reservations.revoke_newest():
                return None

    def _drop(self, digest: str) -> int:
        """Remove an adapter's image; return the size of the free block that now includes it."""
        image = self._images.pop(digest)
        self._reservations.revoke(digest)
        hole = self._blocks.release(image.offset, image.layout.image_elements)
        self._on_change(digest)
        return hole

    def _view(self, image: _Image) -> torch.Tensor:
        return self._arena[image.offset : image.offset + image.layout.image_elements]


def host_memory(
    elements: int,
    dtype: torch.dtype,
    pin: bool,
    shared: SharedMemory | None,
    setting: str = "adapter_host_bytes",
) -> torch.Tensor:
    """Return host memory for adapters' packed images or KV pages, as a tensor.

    Does not use torch's pin_memory, which rounds the size up to a power of two.

    pin: whether to page-lock the memory in this process.
    shared: shared memory to use; None: private memory is allocated.
    setting: name of the EngineSettings field that gives the size, for the error.

    Raises SettingsError if the host cannot page-lock so much.
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
                f"{setting}: the host cannot pin {arena.nbytes} bytes (CUDA error {status}); "
                "lower it"
            )
        weakref.finalize(arena, cudart.cudaHostUnregister, arena.data_ptr())
    return arena
