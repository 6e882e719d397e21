"""An adapter's image as a file of the disk cache: what was packed once is only read from then on.

A safetensors file with one tensor, `image`, and in the header's metadata the file's own name and
the rank of every linear; all that the layout says follows from these. The name says what the image
depends on, so nobody reads one that was made for another model, dtype or shard.

The values carry no checksum. A file has its name only once all of it is on the disk, and its size
is in its header, so a crash leaves no image that is short. What the disk itself damages later goes
unseen as it does in the blob beside it, which is verified once, when it is downloaded: looking
again would take longer than the reading (84 MB: read in 13 ms, crc32 39, SHA-256 67).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import ALIGNMENT, AdapterLimits, BaseShape
from lorikeet_engine.adapter_format.header import read_header
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.residency.shard import WHOLE, Shard

# Raise this with every change to what pack or PackedLayout makes of the same blob.
_VERSION = 1
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def fingerprint(
    shape: BaseShape, limits: AdapterLimits, dtype: torch.dtype, shard: Shard = WHOLE
) -> str:
    """16 hex digits that change with anything that an image depends on, besides the blob.

    limits: the blob's are checked before it is packed, and not again when its image is read.
    """
    facts = (_VERSION, ALIGNMENT, tuple(shape.groups.values()), shape, limits, dtype, shard)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def write_image(path: Path, name: str, layout: PackedLayout, image: torch.Tensor) -> None:
    """Write the file that is to have this name. image [layout.elements], on the CPU."""
    ranks = layout.rows[..., 2].flatten().tolist()
    header = {
        "__metadata__": {"name": name, "ranks": " ".join(map(str, ranks))},
        "image": {
            "dtype": _DTYPES[image.dtype],
            "shape": [layout.elements],
            "data_offsets": [0, image.nbytes],
        },
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(image.view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image's file that was found good: the image is its bytes from `begin` to the end."""

    path: Path
    layout: PackedLayout
    begin: int

    @classmethod
    def of(cls, path: Path, shape: BaseShape, shard: Shard = WHOLE) -> "ImageFile":
        """Read the header only. Raises AdapterRejected when the file is damaged."""
        header = read_header(path)
        image, ranks = header.tensors.get("image"), header.metadata.get("ranks")
        if header.metadata.get("name") != path.name or image is None or ranks is None:
            raise _damaged(path)
        layout = PackedLayout.of_ranks(_table(ranks, shape, path), shape, shard)
        if image.shape != (layout.elements,):
            raise _damaged(path)
        return cls(path, layout, image.begin)

    def read(self, out: torch.Tensor) -> None:
        """Read into out [layout.elements]. Raises AdapterRejected if the file was changed."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            if file.readinto(out.view(torch.uint8).numpy().data) != out.nbytes:
                raise _damaged(self.path)


def _table(text: str, shape: BaseShape, path: Path) -> list[list[int]]:
    """ranks[layer][linear]."""
    ranks, width = text.split(), len(shape.linears)
    if len(ranks) != shape.layers * width or not all(map(str.isdecimal, ranks)):
        raise _damaged(path)
    return [list(map(int, ranks[at : at + width])) for at in range(0, len(ranks), width)]


def _damaged(path: Path) -> AdapterRejected:
    return AdapterRejected(f"{path.name} is no image, or is damaged", field="header")
