"""An adapter's image: all its matrices in one run of elements, the same on the host and the GPU.

For each layer and each fused group come the group's A matrices, then its B matrices transposed,
every matrix at a multiple of ALIGNMENT elements and of its true rank. Where processes share the
layers, each packs its own shard's part of every matrix and reads nothing else.
"""

from dataclasses import dataclass
from io import FileIO
from pathlib import Path

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
from lorikeet_engine.residency.shard import WHOLE, Cut, Shard

FUSED_GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each matrix lies in an adapter's image.

    rows [layers, linears, 3] int64, on the CPU: element offsets of A and B in the image, and the
    rank; all 0 where the adapter leaves a linear alone. elements: the image's size. cuts: for each
    of LINEARS, what of its matrices is in the image; the rank is the adapter's, and A may have
    fewer rows. layers: where in the image each layer begins; one that has nothing there, where the
    next does.
    """

    rows: torch.Tensor
    elements: int
    max_rank: int
    cuts: tuple[Cut, ...]
    layers: tuple[int, ...]

    @classmethod
    def of(cls, spec: AdapterSpec, shape: BaseShape, shard: Shard = WHOLE) -> "PackedLayout":
        """The layout of a validated adapter for its base model, or of its part in one shard.

        Raises SettingsError when the base model cannot be cut so.
        """
        cuts = shard.cuts(shape)
        rows = torch.zeros(shape.layers, len(LINEARS), 3, dtype=torch.int64)
        parts = {(part.layer, part.linear): part for part in spec.linears}
        layers, end = [], 0
        for layer in range(shape.layers):
            layers.append(end)
            for group in FUSED_GROUPS:
                members = [parts[layer, n] for n in group if (layer, n) in parts]
                for side in (0, 1):
                    for part in members:
                        rows[layer, part.linear, side] = end
                        rows[layer, part.linear, 2] = part.rank
                        end += aligned(cuts[part.linear].elements(part.rank)[side])
        return cls(rows, end, spec.max_rank, cuts, tuple(layers))

    def rows_at(self, offset: int | torch.Tensor) -> torch.Tensor:
        """The table's rows for an image that begins at this element of the arena.

        A tensor [layers, 1, 1] has an offset for each layer: where the image would begin if all
        of it lay as that layer does.
        """
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
            cut = layout.cuts[part.linear]
            a_at, b_at, rank = layout.rows[part.layer, part.linear].tolist()
            a = _read(file, part.a, cut.a_rows(rank), cut.inputs)
            b = _read(file, part.b, cut.outputs, range(rank)).float() * part.scaling
            for side, at, matrix in (("A", a_at, a), ("B", b_at, b.T)):
                target = out[at : at + matrix.numel()].view(matrix.shape)
                target.copy_(matrix)
                if not target.isfinite().all():
                    raise _overflow(part, side, out.dtype)


def _read(file: FileIO, span: TensorSpan, rows: range, columns: range) -> torch.Tensor:
    """These rows and columns of a matrix of the file, and no other byte of it."""
    width = span.shape[1]
    matrix = torch.empty(len(rows), len(columns), dtype=_DTYPES[span.dtype])
    together = rows.step == 1 and len(columns) == width
    into = matrix.view(torch.uint8).numpy()
    for strip, row in [(into, rows.start)] if together else zip(into, rows, strict=True):
        file.seek(span.begin + (row * width + columns.start) * matrix.itemsize)
        if file.readinto(strip) != strip.nbytes:  # type: ignore[arg-type]
            raise AdapterRejected("the blob ended early: its file was changed", field="size")
    return matrix


def _overflow(part: LinearLora, side: str, dtype: torch.dtype) -> AdapterRejected:
    name = f"layers.{part.layer}.{LINEARS[part.linear]}.lora_{side}"
    return AdapterRejected(
        f"{name} with scaling {part.scaling:g} does not fit {dtype}: serve it in float32 or "
        "bfloat16",
        field=name,
    )
