"""Layers of a blob as they are packed: in its order, those that are alike together."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from lorikeet_engine.adapter_format import AdapterSpec, LinearLora, TensorSpan
from lorikeet_engine.residency.packing import PackedLayout

_WIDEST = 4  # bytes of an element


class StagedLayer(NamedTuple):
    """A layer's linears, and where each matrix lies in `size` bytes beside the image.

    begin: where in a span of the image the layer begins. likeness: equal for layers whose matrices
    have the same sizes, places there and places from `begin` on.
    """

    parts: tuple[LinearLora, ...]
    places: dict[TensorSpan, int]
    size: int
    begin: int
    likeness: object

    @property
    def end(self) -> int:
        """Where in the file the last of it ends."""
        return max(matrix.end for matrix in self.places)


def staged_layers(spec: AdapterSpec, layout: PackedLayout) -> list[StagedLayer]:
    """All layers that have linears, the outer one among them, in the file's order."""
    table = layout.rows.tolist()
    layers = [
        _staged(tuple(parts), layout.layers[layer], table[layer])
        for layer, parts in groupby(spec.linears, key=lambda part: part.layer)
    ]
    return sorted(layers, key=lambda layer: next(iter(layer.places)).begin)


def layers_together(layers: Sequence[StagedLayer], most_bytes: int) -> Iterator[list[StagedLayer]]:
    """Yield runs of layers to pack at once: alike, and equally far from each other in the image.

    most_bytes: of the file, of more than one layer.
    """
    run: list[StagedLayer] = []
    for layer in layers:
        strides = {after.begin - one.begin for one, after in pairwise([*run, layer])}
        alike = not run or run[0].likeness == layer.likeness
        fits = (len(run) + 1) * layer.size <= most_bytes
        if run and not (alike and fits and len(strides) == 1 and min(strides) > 0):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _staged(
    parts: tuple[LinearLora, ...], begin: int, rows: Sequence[Sequence[int]]
) -> StagedLayer:
    places, size = dict[TensorSpan, int](), 0
    for matrix in sorted({m for part in parts for m in (part.a, part.b)}, key=lambda m: m.begin):
        places[matrix] = size
        size += -(-matrix.size_bytes // _WIDEST) * _WIDEST
    likeness = [
        (
            (part.linear, part.scaling, *(at - begin for at in rows[part.linear][:2])),
            [(matrix.dtype, matrix.shape, places[matrix]) for matrix in (part.a, part.b)],
        )
        for part in parts
    ]
    return StagedLayer(parts, places, size, begin, likeness)
