"""Layout of an adapter's image: all matrices in one run of elements, the same on host and GPU.

For each layer, and once more for the outer layer (lm_head and embeddings), and for each fused
group: the A matrices of the group, then its B matrices, transposed. Every matrix begins at a
multiple of ALIGNMENT elements and has its true rank. The matrices of one linear's experts follow
each other without a gap. A of the embeddings is transposed, too, since a token reads one column.
Last come the rows of trained tokens, stored as A, with their ids as B.

Where ranks share the layers, an image has one span a rank, one after another, each with that rank's
part of every matrix. All spans are laid out like rank 0's, whose parts are the largest, so an
offset in one GPU's arena is valid in all.
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
    """Layout of an adapter's image.

    rows: [layers + 1, modules, 3] int64, on the CPU, as BaseShape says: element offsets of A and B
        in the span, and the rank; all 0 where the adapter leaves a linear alone.
    elements: size of a span, which is the image's size on one GPU.
    ranges: for each rank's span and each of the shape's modules, the part of the matrices in the
        span.
    layers: offset of each layer in the span, then of the outer layer. A layer without matrices has
        the offset of the next.
    head_rank: rank of lm_head.
    head_rows: number of replaced rows of lm_head; not counted in head_rank, nor the other way
        round.
    changes_experts: whether there are matrices of experts.
    shared_a: as in AdapterSpec.
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
        """Size of all spans together, which is the image's size on the host."""
        return self.elements * len(self.ranges)

    def check_size(self, max_elements: int) -> None:
        """Raise AdapterTooLarge if a span has more elements than the arenas."""
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

        world: number of ranks that share the model.
        Raises SettingsError if the base model cannot be divided among them.
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
        """Return the layout for ranks by (layer, module), which may be 0.

        A head that is tied to the embeddings gets the embeddings' rows. Raises SettingsError as
        `of` does.
        shared_a: as in AdapterSpec.
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
        """Return the table's rows for a span at this offset in the arena.

        offset: a number, or a tensor [layers + 1, 1, 1] with an offset for each layer, each being
            the begin of the whole span if that layer's piece extended over it.
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
    """Compute PackedLayout's rows, layers and elements for a span of these ranges."""
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
    """An image in memory, with all of its spans.

    elements: [layout.image_elements].
    sums: when packed, of the first span's layers, then of the next one's.
    """

    layout: PackedLayout
    elements: torch.Tensor
    sums: LayerSums

    def span(self, rank: int) -> torch.Tensor:
        """Return the elements of this rank's GPU, [layout.elements]."""
        return self.elements.view(-1, self.layout.elements)[rank]

    def span_sums(self, rank: int) -> LayerSums:
        """Return the sums of this rank's span."""
        count = len(self.layout.layers)
        return self.sums[rank * count : (rank + 1) * count]
