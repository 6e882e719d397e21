"""An adapter's image: all its matrices in one run of elements, the same on the host and the GPU.

For each layer, and once more for what the model has once, and each fused group come the group's A
matrices, then its B matrices transposed, every matrix at a multiple of ALIGNMENT elements and of
its true rank; of experts one linear's for all of them follow each other without a gap. A of the
embeddings is transposed, too, since a token reads a column of it. Last are the rows of trained
tokens as A, with their ids as B.

Where ranks share the layers, an image has a span for each of them, one after another: a rank's part
of every matrix. All are laid out as the first rank's, whose parts are the largest: a place in one
GPU's arena is a place in all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from lorikeet_engine.adapter_format import (
    AdapterSpec,
    BaseShape,
    LinearLora,
    TensorSpan,
    aligned,
)
from lorikeet_engine.adapter_format.families import EMBEDDING_ROWS, HEAD, HEAD_ROWS
from lorikeet_engine.adapter_format.token_rows import digits
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.parallel.shard import Shard, ShardRange
from lorikeet_engine.residency.checksums import LayerSums, layer_sums

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each matrix lies in a span of an adapter's image.

    rows [layers + 1, modules, 3] int64, on the CPU, as BaseShape says: element offsets of A and B
    in the span, and the rank; all 0 where the adapter leaves a linear alone. elements: the span's
    size, which is what the image takes on one GPU. ranges: for each rank's span, and each of the
    shape's modules, what of its matrices is there. layers: where in the span each layer begins, and
    then the outer one; one that has nothing there, where the next does. head_rank: lm_head's.
    head_rows: how many rows of it are replaced. Neither counts as the other. changes_experts:
    whether there are matrices of experts. shared_a: AdapterSpec's.
    """

    rows: torch.Tensor
    elements: int
    max_rank: int
    ranges: tuple[tuple[ShardRange, ...], ...]
    layers: tuple[int, ...]
    head_rank: int
    head_rows: int
    changes_experts: bool
    shared_a: frozenset[tuple[int, int]] = frozenset()

    @property
    def image_elements(self) -> int:
        """The size of all spans together, which is what the image takes on the host."""
        return self.elements * len(self.ranges)

    @classmethod
    def of(cls, spec: AdapterSpec, shape: BaseShape, world: int = 1) -> "PackedLayout":
        """The layout of a validated adapter for its base model, which `world` ranks share.

        Raises SettingsError when the base model cannot be cut so.
        """
        ranks = {(part.layer, part.linear): part.rank for part in spec.linears}
        ranks |= {(shape.outer_layer, part.linear): len(part.ids) for part in spec.token_rows}
        return cls.of_ranks(ranks, shape, world, spec.shared_a)

    @classmethod
    def of_ranks(
        cls,
        ranks: Mapping[tuple[int, int], int],
        shape: BaseShape,
        world: int = 1,
        shared_a: frozenset[tuple[int, int]] = frozenset(),
    ) -> "PackedLayout":
        """The layout of ranks by (layer, module), which may be 0; shared_a: AdapterSpec's.

        A head that is tied to the embeddings has their rows. Raises SettingsError as `of` does.
        """
        ranks, outer = dict(ranks), shape.outer_layer
        of_head, of_embeddings = shape.index(HEAD_ROWS.name), shape.index(EMBEDDING_ROWS.name)
        shared = shape.tied and ranks.get((outer, of_embeddings), 0) > 0
        if shared:
            ranks.pop((outer, of_head), None)
        ranges = tuple(Shard(index, world).ranges(shape) for index in range(world))
        table, layers, end = _places(ranks, shape, ranges[0], shared_a)
        if shared:
            table[outer, of_head] = table[outer, of_embeddings]
        return cls(
            table,
            end,
            int(table[..., :of_head, 2].max()),
            ranges,
            layers,
            head_rank=int(table[outer, shape.index(HEAD.name), 2]),
            head_rows=int(table[outer, of_head, 2]),
            changes_experts=_changes_experts(table, shape),
            shared_a=shared_a,
        )

    def rows_at(self, offset: int | torch.Tensor) -> torch.Tensor:
        """The table's rows for a span that begins at this element of the arena.

        A tensor [layers + 1, 1, 1] has an offset for each layer: where the span would begin if all
        of it lay as that layer does.
        """
        rows = self.rows.clone()
        rows[..., :2] += offset * (rows[..., 2:] > 0)
        return rows


def _places(
    ranks: Mapping[tuple[int, int], int],
    shape: BaseShape,
    ranges: Sequence[ShardRange],
    shared_a: frozenset[tuple[int, int]],
) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """PackedLayout's rows, layers and elements of a span of these ranges."""
    modules = range(len(shape.modules))
    groups = [*shape.groups.values(), *((n,) for n in modules[len(shape.linears) :])]
    rows = [
        [[0, 0, ranks.get((layer, n), 0)] for n in modules] for layer in range(shape.layers + 1)
    ]
    layers, end = [], 0
    for number, layer in enumerate(rows):
        layers.append(end)
        for group in groups:
            members = [(n, layer[n][2]) for n in group if layer[n][2]]
            for side in (0, 1):
                for n, rank in members:
                    if side == 0 and (number, n) in shared_a:
                        layer[n][0] = layer[n - 1][0]
                        continue
                    layer[n][side] = end
                    end += aligned(shape.matrices(n) * ranges[n].elements(rank)[side])
    return torch.tensor(rows, dtype=torch.int64), tuple(layers), end


def _changes_experts(rows: torch.Tensor, shape: BaseShape) -> bool:
    of_experts = [n for n, linear in enumerate(shape.linears) if linear.of_experts]
    return bool(rows[:, of_experts, 2].any())


class PackedImage(NamedTuple):
    """An image in memory, all of its spans, and its sums when it was packed.

    elements [layout.image_elements]. sums: of the first span's layers, then of the next one's.
    """

    layout: PackedLayout
    elements: torch.Tensor
    sums: LayerSums

    def span(self, rank: int) -> torch.Tensor:
        """The elements that this rank's GPU has, [layout.elements]."""
        return self.elements.view(-1, self.layout.elements)[rank]

    def span_sums(self, rank: int) -> LayerSums:
        """The sums of this rank's span."""
        count = len(self.layout.layers)
        return self.sums[rank * count : (rank + 1) * count]


def pack(blob: Path, spec: AdapterSpec, layout: PackedLayout, out: torch.Tensor) -> LayerSums:
    """Write the image into out [layout.image_elements]: its dtype, and the scaling folded into B.

    Returns the image's sums. B is scaled in float32 before it is rounded. Two matrices at a time
    are in memory besides. Raises AdapterRejected when a value does not fit out's dtype.
    """
    spans = zip(torch.split(out, layout.elements), layout.ranges, strict=True)
    return tuple(
        layer_sum
        for span, ranges in spans
        for layer_sum in _pack_span(blob, spec, layout, ranges, span)
    )


def _pack_span(
    blob: Path,
    spec: AdapterSpec,
    layout: PackedLayout,
    ranges: Sequence[ShardRange],
    out: torch.Tensor,
) -> LayerSums:
    # One buffer each for all matrices: memory that is new for each costs more than the copies.
    stored = torch.empty(max(max(_size(p.a), _size(p.b)) for p in spec.linears), dtype=torch.uint8)
    wide = torch.empty(max(math.prod(m.shape[-2:]) for p in spec.linears for m in (p.a, p.b)))
    _pack_token_rows(blob, spec, layout, out)
    with blob.open("rb", buffering=0) as file:
        for part in spec.linears:
            kept = ranges[part.linear]
            a_at, b_at, rank = layout.rows[part.layer, part.linear].tolist()
            a_elements, b_elements = kept.elements(rank)
            for expert in range(part.experts):
                a_span, b_span = part.of_expert(expert)
                a_begin, b_begin = a_at + expert * a_elements, b_at + expert * b_elements
                # one that two linears share is written twice, alike
                a = _matrix(out, a_begin, rank, len(kept.inputs))
                saved = _matrix(wide, 0, rank, len(kept.inputs)) if part.gathers else a
                _read(file, a_span, range(rank), kept.inputs, saved, stored)
                if part.gathers:
                    a.view(len(kept.inputs), rank).copy_(saved.T)
                b = _matrix(wide, 0, kept.d_out, rank)
                runs = torch.split(b, [len(rows) for rows in kept.outputs])
                for rows, run in zip(kept.outputs, runs, strict=True):
                    _read(file, b_span, rows, range(rank), run, stored)
                b_transposed = _matrix(out, b_begin, rank, kept.d_out)
                b_transposed.copy_(b.mul_(part.scaling).T)
                for side, matrix in (("A", a), ("B", b_transposed)):
                    if not _finite(matrix):
                        raise _overflow(part, side, out.dtype)
    return layer_sums(out, layout.layers)


def _pack_token_rows(
    blob: Path, spec: AdapterSpec, layout: PackedLayout, out: torch.Tensor
) -> None:
    with blob.open("rb", buffering=0) as file:
        for part in spec.token_rows:
            at, ids_at, count = layout.rows[-1, part.linear].tolist()
            rows = _matrix(out, at, *part.rows.shape)
            stored = torch.empty(_size(part.rows), dtype=torch.uint8)
            _read(file, part.rows, range(count), range(part.rows.shape[1]), rows, stored)
            _matrix(out, ids_at, count, 3).copy_(torch.tensor(list(digits(part.ids))))
            if not _finite(rows):
                name = part.matrix()
                raise AdapterRejected(f"{name} does not fit {out.dtype}", field=name)


def _size(span: TensorSpan) -> int:
    return span.end - span.begin


def _matrix(memory: torch.Tensor, at: int, rows: int, columns: int) -> torch.Tensor:
    return memory[at : at + rows * columns].view(rows, columns)


def _read(
    file: FileIO,
    span: TensorSpan,
    rows: range,
    columns: range,
    out: torch.Tensor,
    stored: torch.Tensor,
) -> None:
    """Read into out these rows and columns of a matrix of the file, and no other byte of it.

    stored: bytes to read to where out has another dtype.
    """
    dtype, width = _DTYPES[span.dtype], span.shape[1]
    elements = len(rows) * len(columns)
    matrix = out
    if dtype != out.dtype:
        matrix = stored[: elements * dtype.itemsize].view(dtype).view(len(rows), len(columns))
    together = rows.step == 1 and len(columns) == width
    into = matrix.view(torch.uint8).numpy()
    for strip, row in [(into, rows.start)] if together else zip(into, rows, strict=True):
        file.seek(span.begin + (row * width + columns.start) * dtype.itemsize)
        if file.readinto(strip) != strip.nbytes:  # type: ignore[arg-type]
            raise AdapterRejected("the blob ended early: its file was changed", field="size")
    if matrix is not out:
        out.copy_(matrix)


def _finite(matrix: torch.Tensor) -> bool:
    """Whether all values are finite, by their sum, which costs a thirtieth of looking at each.

    Finite values can have a sum that is not: then each is looked at.
    """
    return math.isfinite(matrix.sum().item()) or bool(matrix.isfinite().all())


def _overflow(part: LinearLora, side: str, dtype: torch.dtype) -> AdapterRejected:
    name = part.matrix(side)
    return AdapterRejected(
        f"{name} with scaling {part.scaling:g} does not fit {dtype}: serve it in float32 or "
        "bfloat16",
        field=name,
    )
