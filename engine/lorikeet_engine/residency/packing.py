"""An adapter's image: all its matrices in one run of elements, the same on the host and the GPU.

For each layer and each fused group come the group's A matrices, then its B matrices transposed,
every matrix at a multiple of ALIGNMENT elements and of its true rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from lorikeet_engine.adapter_format import (
    LINEARS,
    AdapterSpec,
    BaseShape,
    LinearLora,
    TensorSpan,
    aligned,
)
from lorikeet_engine.errors import AdapterRejected

FUSED_GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each matrix lies in an adapter's image.

    rows [layers, linears, 3] int64, on the CPU: element offsets of A and B in the image, and the
    rank; all 0 where the adapter leaves a linear alone. elements: the image's size.
    """

    rows: torch.Tensor
    elements: int
    max_rank: int

    @classmethod
    def of(cls, spec: AdapterSpec, shape: BaseShape) -> "PackedLayout":
        """The layout of a validated adapter for its base model."""
        rows = torch.zeros(shape.layers, len(LINEARS), 3, dtype=torch.int64)
        parts = {(part.layer, part.linear): part for part in spec.linears}
        end = 0
        for layer in sorted({part.layer for part in spec.linears}):
            for group in FUSED_GROUPS:
                members = [parts[layer, n] for n in group if (layer, n) in parts]
                for side in (0, 1):
                    for part in members:
                        rows[layer, part.linear, side] = end
                        rows[layer, part.linear, 2] = part.rank
                        d_in, d_out = shape.dims(part.linear)
                        end += aligned(part.rank * (d_out if side else d_in))
        return cls(rows, end, spec.max_rank)

    def rows_at(self, offset: int) -> torch.Tensor:
        """The table's rows for an image that begins at this element of the arena."""
        rows = self.rows.clone()
        rows[..., :2] += offset * (rows[..., 2:] > 0)
        return rows


def pack(blob: Path, spec: AdapterSpec, layout: PackedLayout, out: torch.Tensor) -> None:
    """Write the image into out [layout.elements]: its dtype, and the scaling folded into B.

    B is scaled in float32 before it is rounded. One matrix at a time is in memory besides.
    Raises AdapterRejected when a value does not fit out's dtype.
    """
    with blob.open("rb", buffering=0) as file:
        for part in spec.linears:
            a_at, b_at, _ = layout.rows[part.layer, part.linear].tolist()
            a, b = _read(file, part.a), _read(file, part.b).float() * part.scaling
            for side, at, matrix in (("A", a_at, a), ("B", b_at, b.view(-1, part.rank).T)):
                target = out[at : at + matrix.numel()].view(matrix.shape)
                target.copy_(matrix)
                if not target.isfinite().all():
                    raise _overflow(part, side, out.dtype)


def _read(file: BinaryIO, span: TensorSpan) -> torch.Tensor:
    data = bytearray(span.end - span.begin)
    file.seek(span.begin)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise AdapterRejected("the blob ended early: its file was changed", field="size")
    return torch.frombuffer(data, dtype=_DTYPES[span.dtype])


def _overflow(part: LinearLora, side: str, dtype: torch.dtype) -> AdapterRejected:
    name = f"layers.{part.layer}.{LINEARS[part.linear]}.lora_{side}"
    return AdapterRejected(
        f"{name} with scaling {part.scaling:g} does not fit {dtype}: serve it in float32 or "
        "bfloat16",
        field=name,
    )
