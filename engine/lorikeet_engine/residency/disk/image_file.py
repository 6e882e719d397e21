"""The file format of an adapter's image on the disk, so that a blob is packed only once.

A safetensors file with one tensor, `image`. The metadata holds the file's name, all that determines
the layout (the ranks of PackedLayout.rows, the linears that share A, and the matrices that experts
share), and each layer's checksum (checksums.py). The name contains a fingerprint of all that the
image depends on, so no process reads an image for another model, dtype or number of GPUs.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import ALIGNMENT, AdapterLimits, BaseShape
from lorikeet_engine.adapter_format.header import read_header
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.residency.checksums import LayerSums, layer_sums
from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from lorikeet_engine.residency.workers import Workers

log = logging.getLogger(__name__)

# Increase with every change to the format, or to the result of `pack` or PackedLayout.
_VERSION = 7
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def fingerprint(shape: BaseShape, limits: AdapterLimits, dtype: torch.dtype, world: int = 1) -> str:
    """Return a fingerprint (16 hex digits) of all that determines an image (a packed adapter),
    apart from the adapter's own file.

    limits: limits on adapters. They are included because an image file is read without the checks
        of the adapter's own file.
    dtype: dtype of the image.
    world: number of tensor parallel ranks that share the model.
    """
    facts = (_VERSION, ALIGNMENT, tuple(shape.groups.values()), shape, limits, dtype, world)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def write_image(path: Path, name: str, image: PackedImage) -> None:
    """Write an adapter's packed image as a file.

    path: file to write, which may have a temporary name.
    name: final name of the file, which is stored inside it.
    image: image on the CPU.
    """
    layout, elements, sums = image
    ranks, width = layout.rows[..., 2].flatten().tolist(), layout.rows.shape[1]
    shared = sorted(layer * width + linear for layer, linear in layout.shared_a)
    outer = sorted(
        (layer * width + linear) * 2 + side for layer, linear, side in layout.shared_outer
    )
    texts = {"ranks": _text(ranks), "sums": _text(sums)}
    texts |= {"shared_a": _text(shared), "shared_outer": _text(outer)}
    header = {
        "__metadata__": {"name": name, **texts},
        "image": {
            "dtype": _DTYPES[elements.dtype],
            "shape": [layout.image_elements],
            "data_offsets": [0, elements.nbytes],
        },
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(elements.view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Image file with a valid header. An image is an adapter packed for the GPU.

    begin: byte of the file at which the image begins; the image ends where the file ends.
    sums: checksums of the image's layers when it was packed, as text.
    """

    path: Path
    layout: PackedLayout
    begin: int
    sums: str

    @classmethod
    def of(cls, path: Path, shape: BaseShape, world: int = 1) -> "ImageFile":
        """Read a packed adapter's file header. Raises AdapterRejected if the header is damaged.

        world: number of tensor parallel ranks that share the model.
        """
        header = read_header(path)
        image, facts = header.tensors.get("image"), header.metadata
        ranks, shared, outer, sums = (
            facts.get(key) for key in ("ranks", "shared_a", "shared_outer", "sums")
        )
        if facts.get("name") != path.name or image is None:
            raise _damaged(path)
        if ranks is None or shared is None or outer is None or sums is None:
            raise _damaged(path)
        table = _table(ranks, shape, path)
        sets = _shared(shared, table, path), _shared_outer(outer, shape, path)
        layout = PackedLayout.of_ranks(table, shape, world, *sets)
        if image.shape != (layout.image_elements,):
            raise _damaged(path)
        return cls(path, layout, image.begin, sums)

    def read(self, out: torch.Tensor) -> LayerSums:
        """Read the image into `out`, [layout.image_elements]; return the layers' checksums.

        Raises AdapterRejected if the checksums of the data differ from those stored in the file.
        """
        with self.path.open("rb") as file:
            file.seek(self.begin)
            if file.readinto(out.view(torch.uint8).numpy().data) != out.nbytes:
                raise _damaged(self.path)
        spans, layers = torch.split(out, self.layout.elements), self.layout.layers
        sums = tuple(layer_sum for span in spans for layer_sum in layer_sums(span, layers))
        if _text(sums) != self.sums:
            raise _damaged(self.path)
        return sums


def _text(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _table(text: str, shape: BaseShape, path: Path) -> dict[tuple[int, int], int]:
    """Parse the LoRA ranks in an image file's metadata: the rank for each (layer, module).

    text: decimal numbers, separated by spaces.
    path: the file, named in errors.
    """
    ranks, width = text.split(), len(shape.modules)
    if len(ranks) != (shape.layers + 1) * width or not all(map(str.isdecimal, ranks)):
        raise _damaged(path)
    return {divmod(at, width): int(rank) for at, rank in enumerate(ranks)}


def _shared(
    text: str, ranks: Mapping[tuple[int, int], int], path: Path
) -> frozenset[tuple[int, int]]:
    """Parse, from an image file's metadata, the set of linears that share their A with the
    preceding linear, each as (layer, linear).

    text: indices into `ranks`, separated by spaces.
    ranks: the LoRA ranks in the same file, by (layer, module).
    path: the file, named in errors.
    """
    places, known = text.split(), list(ranks)
    if not all(place.isdecimal() and int(place) < len(known) for place in places):
        raise _damaged(path)
    shared = frozenset(known[int(place)] for place in places)
    if any(linear == 0 for _, linear in shared):
        raise _damaged(path)
    return shared


def _shared_outer(text: str, shape: BaseShape, path: Path) -> frozenset[tuple[int, int, int]]:
    """Parse, from an image file's metadata, the set of matrices that all experts share, each as
    (layer, linear, side).

    text: indices of the matrices, A before B of each linear, separated by spaces.
    path: the file, named in errors.
    """
    places, width = text.split(), len(shape.modules)
    if not all(map(str.isdecimal, places)):
        raise _damaged(path)
    found = frozenset((at // 2 // width, at // 2 % width, at % 2) for at in map(int, places))
    if not all(
        layer < shape.layers and shape.modules[linear].of_experts for layer, linear, _ in found
    ):
        raise _damaged(path)
    return found


def _damaged(path: Path) -> AdapterRejected:
    return AdapterRejected(f"{path.name} is no image, or is damaged", field="header")


class ImageWriter:
    """Writes adapters' packed images from host memory to the disk, one after another, on a thread
    of its own.

    on_release: called when an image's data is written, so that host memory may evict the image
        again.
    """

    def __init__(self, disk: DiskCache, host: HostArena, on_release: Callable[[], None]) -> None:
        self._disk, self._host, self._on_release = disk, host, on_release
        self._worker = Workers(1, "write")

    def write(self, ref: AdapterRef, *, urgent: bool) -> None:
        """Queue an adapter's image for writing.

        The image is skipped if, once its turn comes, the disk has the image already or the host no
        longer has it.

        urgent: whether to write it before all images that are not urgent.
        """
        self._worker.submit(partial(self._write, ref), urgent=urgent, tenant=ref.tenant)

    def close(self) -> None:
        """Stop writing: adapters' images that wait in the queue are not begun."""
        self._worker.close()

    def _write(self, ref: AdapterRef) -> None:
        held = None if self._disk.has_image(ref.digest) else self._host.hold(ref.digest)
        if held is None:
            return
        try:
            with self._disk.adding_image(ref.digest) as part:
                try:
                    write_image(part, self._disk.image_name(ref.digest), held)
                finally:  # release before the file is synced, which can take seconds
                    self._host.release(ref.digest)
                    self._on_release()  # a load may be waiting for the memory
        except OSError as error:
            log.warning("image_not_written", extra={"adapter": str(ref), "error": str(error)})
