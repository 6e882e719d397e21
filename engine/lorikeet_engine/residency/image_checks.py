"""Periodic checks that the images in memory still equal the images that were packed.

    step 0 ───── 256 ───── 512 ───── 768 ──▶
         begin    compare   compare
                  begin     begin      the sums (checksums.py) of one slice of an image on the GPU
                                       and of one on the host

A slice is an image, or some layers of a large one. A round checks every slice of a tier once, and
takes EVERY_STEPS steps for each. Damage is found within two rounds. A separate thread waits for the
checksum, or computes it on a CPU. The checksum of an image that was evicted, moved or loaded again
in the meantime is ignored.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.device.async_copies import Download
from lorikeet_engine.errors import AdapterDamaged
from lorikeet_engine.residency.checksums import LayerSums, added, word_sum
from lorikeet_engine.residency.gpu.adapters import GpuAdapter, GpuAdapters
from lorikeet_engine.residency.gpu.arena import Piece
from lorikeet_engine.residency.gpu.slots import PlacedImage, SlotPool
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout

log = logging.getLogger(__name__)

EVERY_STEPS = 256
"""Number of steps from one check to the next: about a second for an 8B model.

A check takes the engine 0.5 ms.
"""
# An H200 sums this in about 40 µs.
_DEVICE_SLICE_BYTES = 128 << 20
# A CPU core sums this in about 2 ms, beside the steps.
_HOST_SLICE_BYTES = 16 << 20
_RETRY_S = 1.0  # a reload usually takes less


class CheckedImage(NamedTuple):
    """Packed adapter (image) to check in one tier; with tensor parallelism, one rank's part (span)
    of an image.

    digest: digest of the adapter.
    sums: checksums of the layers in the span when the image was packed.
    memory: memory that contains the span: the GPU's arena, or a view of the host's.
    pieces: places of the span's parts in `memory`.
    unchanged: returns whether the whole image is still in the same place.
    """

    digest: str
    layout: PackedLayout
    sums: LayerSums
    memory: torch.Tensor
    pieces: Sequence[Piece]
    unchanged: Callable[[], bool]

    def slices(self, max_bytes: int) -> Iterator["ImageSlice"]:
        """Yield the image in slices of whole layers.

        max_bytes: limit on the size of a slice; a single layer may exceed it.
        """
        most, layout = max_bytes // self.memory.itemsize, self.layout
        layers = list(zip(pairwise((*layout.layers, layout.elements)), self.sums, strict=True))
        for piece in self.pieces:
            begin, sums = piece.begin, list[int]()
            for (first, end), layer_sum in layers:
                if not piece.begin <= first < end <= piece.end:
                    continue
                if sums and end - begin > most:
                    yield self._slice(piece, begin, first, sums)
                    begin, sums = first, []
                sums.append(layer_sum)
            yield self._slice(piece, begin, piece.end, sums)

    def _slice(self, piece: Piece, begin: int, end: int, sums: list[int]) -> "ImageSlice":
        at = piece.offset - piece.begin
        return ImageSlice(self, self.memory[at + begin : at + end], added(sums))


class ImageSlice(NamedTuple):
    """Neighbouring layers of an adapter's packed image, which are checked together.

    elements: view of the layers in memory.
    total: checksum of these layers when the image was packed.
    """

    image: CheckedImage
    elements: torch.Tensor
    total: int


class ImageChecks:
    """Periodic checks that adapters' packed images on the GPU and on the host have the checksums
    that they had when they were packed. Damaged ones are loaded again.

    For the engine's thread only.
    """

    def __init__(
        self,
        gpu: GpuAdapters,
        pool: SlotPool,
        arena: torch.Tensor,
        host: HostArena,
        ref_of: Callable[[str], AdapterRef | None],
        prefetch: Callable[[AdapterRef, Residency, float], None],
    ) -> None:
        """Begin the checks of each tier with the tier's first image.

        gpu: the adapters on the GPU.
        pool: places of the adapters' images in the arena.
        arena: the GPU's memory for adapters.
        host: images in host memory.
        ref_of: returns the adapter with this digest; None if it is unknown.
        prefetch: loads an adapter up to a tier; called for damaged images (Tiers.prefetch).
        """
        self._worker = ThreadPoolExecutor(1, "lorikeet-checks")
        most = _DEVICE_SLICE_BYTES if arena.is_cuda else _HOST_SLICE_BYTES
        self._rounds = {
            Residency.GPU: _round(partial(gpu_images, gpu, pool, arena), most),
            Residency.HOST: _round(partial(host_images, host), _HOST_SLICE_BYTES),
        }
        self._gpu, self._host = gpu, host
        self._ref_of, self._prefetch = ref_of, prefetch
        self._under_way: _UnderWay | None = None
        self._damaged: dict[str, AdapterDamaged] = {}
        self._steps = 0

    def step(self) -> None:
        """Count an engine step.

        After every EVERY_STEPS steps, compare the checksums begun earlier, and begin to compute the
        checksums of the next slices.
        """
        self._steps += 1
        if self._steps % EVERY_STEPS:
            return
        if self._under_way is not None:
            if not self._under_way.totals.done():
                return
            self._compare(self._under_way)
        self._under_way = self._begin()

    def discard(self, digest: str, tier: Residency) -> AdapterDamaged:
        """Allow no more use of an adapter's damaged image in one tier; begin to load it again.

        Returns the error for requests that depend on the image.
        """
        ref = self._ref_of(digest)
        log.error("adapter_damaged", extra={"adapter": str(ref or digest), "tier": str(tier)})
        (self._gpu if tier is Residency.GPU else self._host).discard(digest)
        if ref is not None:
            self._prefetch(ref, tier, self._gpu.uses(digest))
        return AdapterDamaged(
            f"{ref or digest}: its weights in memory were damaged and are loaded anew: send the "
            "request again",
            adapter=str(ref or digest),
            retry_after_s=_RETRY_S,
        )

    def take_damaged(self) -> dict[str, AdapterDamaged]:
        """Return an error for each adapter found damaged on the GPU since the last call.

        Keys are digests.
        """
        damaged, self._damaged = self._damaged, {}
        return damaged

    def close(self) -> None:
        """Stop checking adapters' images."""
        self._rounds.clear()
        self._worker.shutdown()

    def _begin(self) -> "_UnderWay | None":
        found = ((tier, next(slices)) for tier, slices in self._rounds.items())
        # the memory of an image that has moved may be gone
        slices = {tier: each for tier, each in found if each and each.image.unchanged()}
        if not slices:
            return None
        sums = [_begin_sum(each.elements) for each in slices.values()]
        totals = self._worker.submit(lambda: [int(total()) for total in sums])
        return _UnderWay(slices, totals)

    def _compare(self, under_way: "_UnderWay") -> None:
        totals = under_way.totals.result()
        for (tier, each), total in zip(under_way.slices.items(), totals, strict=True):
            if total == each.total or not each.image.unchanged():
                continue
            digest = each.image.digest
            damaged = self.discard(digest, tier)
            if tier is Residency.GPU:
                self._damaged[digest] = damaged


class _UnderWay(NamedTuple):
    """Checksums being computed, of at most one slice of an adapter in each tier.

    slices: by tier, the slice whose checksum is computed.
    totals: the checksums, in the order of `slices`.
    """

    slices: dict[Residency, ImageSlice]
    totals: Future[list[int]]


def _begin_sum(elements: torch.Tensor) -> Callable[[], torch.Tensor]:
    if elements.is_cuda:  # on the stream of steps and moves, so in order with them
        return Download(word_sum(elements)).wait
    return partial(word_sum, elements)


def _round(
    images: Callable[[], Iterable[CheckedImage]], slice_bytes: int
) -> Iterator[ImageSlice | None]:
    """Yield the slices of all adapters' images in a tier, over and over; None while it has none.

    images: returns the images that the tier holds at the time of the call.
    slice_bytes: limit on the size of a slice; a single layer may exceed it.
    """
    while True:
        any_there = False
        for image in images():
            yield from image.slices(slice_bytes)
            any_there = True
        if not any_there:
            yield None


def gpu_images(gpu: GpuAdapters, pool: SlotPool, arena: torch.Tensor) -> Iterator[CheckedImage]:
    """Yield the adapters' images on this rank's GPU that steps may read.

    Images on other ranks' GPUs are not included.

    pool: places of the images in the arena.
    arena: the GPU's memory for adapters.
    """
    for adapter in gpu.snapshot():
        digest, image = adapter.ref.digest, pool.image(adapter.slot)
        if image is None or gpu.usable(digest) is not adapter:
            continue
        unchanged = partial(_lies_there, gpu, pool, adapter, image)
        layout, pieces = image.layout, image.pieces
        sums = adapter.sums[: len(layout.layers)]  # of this rank's span, the first
        yield CheckedImage(digest, layout, sums, arena, pieces, unchanged)


def host_images(host: HostArena) -> Iterator[CheckedImage]:
    """Yield the complete images of adapters in host memory, each rank's part (span) by itself."""
    for digest in host.digests():
        image = host.image(digest)
        if image is None:
            continue
        layout, unchanged = image.layout, partial(_is_there, host, digest, image)
        whole = (Piece(0, 0, layout.elements),)
        for rank in range(len(layout.ranges)):
            span, sums = image.span(rank), image.span_sums(rank)
            yield CheckedImage(digest, layout, sums, span, whole, unchanged)


def _lies_there(gpu: GpuAdapters, pool: SlotPool, adapter: GpuAdapter, image: PlacedImage) -> bool:
    return gpu.usable(adapter.ref.digest) is adapter and pool.image(adapter.slot) is image


def _is_there(host: HostArena, digest: str, image: PackedImage) -> bool:
    return host.image(digest) is image
