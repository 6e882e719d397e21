"""Layout of an adapter's image: all matrices in one run of elements, the same on host and GPU.

An image holds one layer after another, and then the outer layer (lm_head and embeddings). Each
layer holds its fused groups of linears in order. Each group holds the A matrices of its linears,
then the B matrices, transposed, then the vectors of its linears: a gain and a bias each
(LoraWeights.vectors). Every matrix begins at a multiple of ALIGNMENT elements and has its
true rank, without padding. The matrices of one linear's experts follow each other without a gap; a
matrix that all experts share ("shared outer") is there once. A of the embeddings is transposed,
too, since a token reads one column. Last come the rows of trained tokens, stored as A, with their
ids as B, and a classification head, with its biases as B.

Where tensor parallel ranks share the layers, an image has one span per rank, one after another. A
rank's span has that rank's part of every matrix. All spans are laid out like rank 0's, whose parts
are the largest, so an offset in one GPU's arena is valid in all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lorikeet_engine.adapter_format import (
    AdapterSpec,
    BaseShape,
    aligned,
)
from lorikeet_engine.adapter_format.families import EMBEDDING_ROWS, HEAD, HEAD_ROWS
from lorikeet_engine.errors import AdapterTooLarge
from lorikeet_engine.parallel.shard import Shard, ShardRange
from lorikeet_engine.residency.checksums import LayerSums


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of an adapter's image, the packed form that is copied to the GPU.

    A span is the part of the image for one tensor parallel rank's GPU.

    rows: [layers + 1, modules, 3] int64, on the CPU, with the rows and columns of BaseShape's
        tables: element offsets of A and B in the span, and the LoRA rank; all 0 for a linear that
        the adapter does not change. The offset of a matrix that all experts share is one higher
        (LoraWeights.table).
    elements: size of a span, which is the image's size on one GPU.
    ranges: for each rank's span and each of the shape's modules, the part of the matrices in the
        span.
    layers: offset of each layer in the span, then of the outer layer (lm_head and embeddings). A
        layer without matrices has the offset of the next.
    max_rank: largest LoRA rank of any linear.
    head_rank: LoRA rank of lm_head's A and B; does not count replaced rows.
    head_rows: number of replaced rows of lm_head.
    changes_experts: whether there are matrices of experts.
    has_token_rows: whether rows of trained tokens are replaced, in lm_head or the embeddings.
    shared_a: (layer, linear) of linears that have the same A as the preceding linear.
    shared_outer: (layer, linear, side) of matrices that all experts share; side is 0 for A, and 1
        for B.
    vectors: [layers + 1, modules] int64, on the CPU: element offset in the span of each linear's
        vectors (gain and bias, as of DoRA); −1 for a linear without vectors. None: no linear has
        vectors.
    """

    rows: torch.Tensor
    elements: int
    max_rank: int
    ranges: tuple[tuple[ShardRange, ...], ...]
    layers: tuple[int, ...]
    head_rank: int
    head_rows: int
    changes_experts: bool
    has_token_rows: bool
    shared_a: frozenset[tuple[int, int]] = frozenset()
    shared_outer: frozenset[tuple[int, int, int]] = frozenset()
    vectors: torch.Tensor | None = None

    @property
    def image_elements(self) -> int:
        """Number of elements of the whole packed adapter, for all GPUs: its size on the host."""
        return self.elements * len(self.ranges)

    def check_size(self, max_elements: int) -> None:
        """Raise AdapterTooLarge if a GPU's part of the packed adapter is larger than the arenas.

        max_elements: elements per GPU that fit into the arenas of both GPU and host.
        """
        if self.elements > max_elements:
            raise AdapterTooLarge(
                f"the adapter has {self.elements} elements and the arenas hold {max_elements}: "
                "enlarge the adapter memory",
                elements=self.elements,
                max_elements=max_elements,
            )

    @classmethod
    def of(cls, spec: AdapterSpec, shape: BaseShape, world: int = 1) -> "PackedLayout":
        """Return the layout of a validated adapter for its base model.

        world: number of tensor parallel ranks that share the model.

        Raises SettingsError if the base model cannot be divided among so many ranks.
        """
        ranks = {(part.layer, part.linear): part.rank for part in spec.linears}
        ranks |= {(shape.outer_layer, part.linear): len(part.ids) for part in spec.token_rows}
        if spec.head is not None:
            ranks[shape.outer_layer, spec.head.linear] = len(spec.head.head.labels)
        vectors = frozenset((part.layer, part.linear) for part in spec.vectors)
        return cls.of_ranks(ranks, shape, world, spec.shared_a, spec.shared_outer, vectors)

    @classmethod
    def of_ranks(
        cls,
        ranks: Mapping[tuple[int, int], int],
        shape: BaseShape,
        world: int = 1,
        shared_a: frozenset[tuple[int, int]] = frozenset(),
        shared_outer: frozenset[tuple[int, int, int]] = frozenset(),
        vectors: frozenset[tuple[int, int]] = frozenset(),
    ) -> "PackedLayout":
        """Return the layout of an adapter that has these LoRA ranks.

        ranks: for each (layer, module), the LoRA rank, or the number of trained token rows or of
            labels; 0 is allowed.
        world: number of tensor parallel ranks that share the model.
        shared_a: (layer, linear) of linears that have the same A as the preceding linear.
        shared_outer: (layer, linear, side) of matrices that all experts share.
        vectors: (layer, linear) of linears that have vectors (gain and bias, as of DoRA).

        Raises SettingsError if the base model cannot be divided among the tensor parallel ranks.
        """
        outer = shape.outer_layer
        of_head, of_embeddings = shape.index(HEAD_ROWS.name), shape.index(EMBEDDING_ROWS.name)
        ranges = tuple(Shard(index, world).ranges(shape) for index in range(world))
        shared_sets = shared_a, shared_outer
        table, places, layers, end = _places(ranks, shape, ranges[0], *shared_sets, vectors)
        return cls(
            table,
            end,
            int(table[..., :of_head, 2].max()),
            ranges,
            layers,
            head_rank=int(table[outer, shape.index(HEAD.name), 2]),
            head_rows=int(table[outer, of_head, 2]),
            changes_experts=_changes_experts(table, shape),
            has_token_rows=bool(table[outer, [of_head, of_embeddings], 2].any()),
            shared_a=shared_a,
            shared_outer=shared_outer,
            vectors=places if vectors else None,
        )

    def rows_at(self, offset: int | torch.Tensor) -> torch.Tensor:
        """Return the adapter's rows for the table of adapters: `rows`, with offsets in the arena.

        offset: offset of the image in the arena. If the image lies in several pieces: a tensor
            [layers + 1, 1, 1] with, for each layer, the layer's offset in the arena less its offset
            in the image.
        """
        rows = self.rows.clone()
        rows[..., :2] += offset * (rows[..., 2:] > 0)
        return rows

    def vectors_at(self, offset: torch.Tensor) -> torch.Tensor | None:
        """Return the adapter's row for LoraWeights.vectors, with offsets in the arena; None for an
        adapter without vectors (gains and biases, as of DoRA).

        offset [layers + 1, 1]: for each layer, the layer's offset in the arena less its offset in
            the image.
        """
        return (
            None
            if self.vectors is None
            else torch.where(self.vectors < 0, self.vectors, self.vectors + offset)
        )


def _places(
    ranks: Mapping[tuple[int, int], int],
    shape: BaseShape,
    ranges: Sequence[ShardRange],
    shared_a: frozenset[tuple[int, int]],
    shared_outer: frozenset[tuple[int, int, int]],
    vectors: frozenset[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], int]:
    """Compute where the matrices and vectors of an image lie: `rows`, `vectors`, `layers` and
    `elements` of PackedLayout.

    ranks: for each (layer, module), the LoRA rank, or the number of trained token rows.
    ranges: for each module, the part of its matrices in one span.
    shared_a: (layer, linear) of linears that have the same A as the preceding linear.
    shared_outer: (layer, linear, side) of matrices that all experts share; side is 0 for A, 1 for
        B.
    vectors: (layer, linear) of linears that have vectors.
    """
    modules = range(len(shape.modules))
    groups = [*shape.groups.values(), *((n,) for n in modules[len(shape.linears) :])]
    rows = [
        [[0, 0, ranks.get((layer, n), 0)] for n in modules] for layer in range(shape.layers + 1)
    ]
    places = torch.full((shape.layers + 1, len(modules)), -1)
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
                    once = (number, n, side) in shared_outer
                    layer[n][side] = end + once
                    count = 1 if once else shape.matrices(n)
                    end += aligned(count * ranges[n].elements(rank)[side])
            for n in group:
                if (number, n) in vectors:
                    places[number, n] = end
                    end += aligned(2 * ranges[n].d_out)
    return torch.tensor(rows, dtype=torch.int64), places, tuple(layers), end


def _changes_experts(rows: torch.Tensor, shape: BaseShape) -> bool:
    of_experts = [n for n, linear in enumerate(shape.linears) if linear.of_experts]
    return bool(rows[:, of_experts, 2].any())


class PackedImage(NamedTuple):
    """Packed adapter (image) in memory, with the parts (spans) for all tensor parallel ranks.

    elements: the matrices, [layout.image_elements].
    sums: checksums of the layers when the image was packed, span by span.
    """

    layout: PackedLayout
    elements: torch.Tensor
    sums: LayerSums

    def span(self, rank: int) -> torch.Tensor:
        """Return the part of the packed adapter that a rank's GPU holds, [layout.elements]."""
        return self.elements.view(-1, self.layout.elements)[rank]

    def span_sums(self, rank: int) -> LayerSums:
        """Return the checksums of the layers that a rank's GPU holds."""
        count = len(self.layout.layers)
        return self.sums[rank * count : (rank + 1) * count]
