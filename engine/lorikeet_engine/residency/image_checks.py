"""Looks now and then whether the images in memory are still what was packed.

    step 0 ──── 32 ──── 64 ──── 96 ──▶
         a slice of an image on the GPU and one of an image on the host are added up
              a step or more later the sums are compared (checksums.py)

A round through a tier takes EVERY_STEPS steps for each image there, or for each slice of a larger
one, and damage is found within two rounds: within one where no images come and go. On CUDA the sum
runs between two steps, and a thread of its own waits for it; on a CPU that thread computes it.
Where an image was evicted, moved or loaded anew meanwhile, its sum says nothing and is not looked
at.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.device.async_copies import Download
from lorikeet_engine.errors import AdapterDamaged
from lorikeet_engine.residency.checksums import LayerSums, added, word_sum
from lorikeet_engine.residency.gpu.adapters import GpuAdapters
from lorikeet_engine.residency.gpu.arena import Piece
from lorikeet_engine.residency.gpu.leases import GpuAdapter
from lorikeet_engine.residency.gpu.slots import PlacedImage, SlotPool
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.packing import PackedImage, PackedLayout

log = logging.getLogger(__name__)

EVERY_STEPS = 32
# An H200 adds this up in some 40 µs, of the 136 ms or more that 32 steps of an 8B model take.
_DEVICE_SLICE_BYTES = 128 << 20
# A core adds this up in some 2 ms, beside the steps.
_HOST_SLICE_BYTES = 16 << 20
_RETRY_S = 1.0  # a load takes less, as a rule


class CheckedImage(NamedTuple):
    """An image that is to be checked.

    memory: the arena in which its pieces lie. unchanged: whether it lies where it did, whole.
    """

    digest: str
    layout: PackedLayout
    sums: LayerSums
    memory: torch.Tensor
    pieces: Sequence[Piece]
    unchanged: Callable[[], bool]

    def slices(self, most_bytes: int) -> Iterator["ImageSlice"]:
        """All of it in turn: as many layers together as are not too large, but at least one."""
        most, layout = most_bytes // self.memory.itemsize, self.layout
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
    """Layers of an image that lie side by side, and what they added up to when it was packed."""

    image: CheckedImage
    elements: torch.Tensor
    total: int


class ImageChecks:
    """Checks the images on the GPU and on the host in turn; those found damaged are loaded anew.

    Belongs to the engine's thread.
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
        """arena: the GPU's memory. ref_of: by digest. prefetch: as Tiers has it."""
        self._worker = ThreadPoolExecutor(1, "lorikeet-checks")
        most = _DEVICE_SLICE_BYTES if arena.is_cuda else _HOST_SLICE_BYTES
        on_gpu, on_host = partial(gpu_images, gpu, pool, arena), partial(host_images, host)
        self._rounds = {
            Residency.GPU: _Round(on_gpu, most, self._worker),
            Residency.HOST: _Round(on_host, _HOST_SLICE_BYTES, self._worker),
        }
        self._gpu, self._host = gpu, host
        self._ref_of, self._prefetch = ref_of, prefetch
        self._damaged: dict[str, AdapterDamaged] = {}
        self._steps = 0

    def step(self) -> None:
        """Count a step; compare the sums that are there, and begin others if it is time."""
        self._steps += 1
        for tier, checks in self._rounds.items():
            if (digest := checks.damaged()) is not None:
                damaged = self.discard(digest, tier)
                if tier is Residency.GPU:
                    self._damaged[digest] = damaged
            if self._steps % EVERY_STEPS == 0:
                checks.begin()

    def discard(self, digest: str, tier: Residency) -> AdapterDamaged:
        """Let nobody use an image of this tier any more, which is damaged, and load it anew.

        Returns the error of the requests that depend on it.
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
        """What checks found damaged on the GPU since the call before, by digest."""
        damaged, self._damaged = self._damaged, {}
        return damaged

    def close(self) -> None:
        """Check nothing more."""
        self._rounds.clear()
        self._worker.shutdown()


class _UnderWay(NamedTuple):
    part: ImageSlice
    total: Future[torch.Tensor]


class _Round:
    """Checks a tier's images slice by slice, and when all are checked from the first one again."""

    def __init__(
        self,
        images: Callable[[], Iterable[CheckedImage]],
        slice_bytes: int,
        worker: ThreadPoolExecutor,
    ) -> None:
        """images: all that the tier holds at the call, each as it is when its turn comes."""
        self._images, self._slice_bytes, self._worker = images, slice_bytes, worker
        self._left: Iterator[ImageSlice] = iter(())
        self._under_way: _UnderWay | None = None

    def begin(self) -> None:
        """Begin the next check, unless one is under way or there is nothing to check."""
        if self._under_way is None and (part := self._next()) is not None:
            self._under_way = _UnderWay(part, self._sum(part.elements))

    def damaged(self) -> str | None:
        """The digest of the image of a check that has ended, if it is damaged."""
        if self._under_way is None or not self._under_way.total.done():
            return None
        (part, total), self._under_way = self._under_way, None
        intact = int(total.result()) == part.total or not part.image.unchanged()
        return None if intact else part.image.digest

    def _next(self) -> ImageSlice | None:
        part = next(self._left, None)
        if part is None:
            slices = (image.slices(self._slice_bytes) for image in self._images())
            self._left = chain.from_iterable(slices)
            part = next(self._left, None)
        return part

    def _sum(self, elements: torch.Tensor) -> Future[torch.Tensor]:
        if elements.is_cuda:  # in order with the steps, and with images that move
            return self._worker.submit(Download(word_sum(elements)).wait)
        return self._worker.submit(word_sum, elements)


def gpu_images(gpu: GpuAdapters, pool: SlotPool, arena: torch.Tensor) -> Iterator[CheckedImage]:
    """The images on the GPU that steps may read."""
    for adapter in gpu.snapshot():
        digest, image = adapter.ref.digest, pool.image(adapter.slot)
        if image is None or image.layout is not adapter.layout or not gpu.holds(digest):
            continue
        unchanged = partial(_lies_there, gpu, pool, adapter, image)
        yield CheckedImage(digest, image.layout, adapter.sums, arena, image.pieces, unchanged)


def host_images(host: HostArena) -> Iterator[CheckedImage]:
    """The images on the host that are written."""
    for digest in host.digests():
        image = host.image(digest)
        if image is None:
            continue
        layout, elements, sums = image
        whole = (Piece(0, 0, layout.elements),)
        unchanged = partial(_is_there, host, digest, image)
        yield CheckedImage(digest, layout, sums, elements, whole, unchanged)


def _lies_there(gpu: GpuAdapters, pool: SlotPool, adapter: GpuAdapter, image: PlacedImage) -> bool:
    return gpu.holds(adapter.ref.digest) and pool.image(adapter.slot) is image


def _is_there(host: HostArena, digest: str, image: PackedImage) -> bool:
    return host.image(digest) is image
