"""Groups of layers that keep their keys and values in the same KV pages.

A layer with a window needs only a sequence's last pages, a layer without a window needs all of
them. So a group consists of layers with the same window, and a sequence has a list of pages for
each group. Pages of all groups hold equally many layers, so that one pool of pages serves all
groups:

    layers              w w w w w F w w w w w F        w: with a window, F: without
    group, place        1·0 1·1 2·0 2·1 3·0 0·0 3·1 4·0 4·1 5·0 5·1 0·1

If layers have keys of different widths, a page consists of pieces of one size. Each piece has room
for one layer with the widest keys, or for several layers with narrower keys:

    keys                2 2 2 2 2 1 2 2 2 2 2 1        2: twice as wide as 1
    pages of group 1    piece 0: layer 0, piece 1: layer 1
    pages of group 0    piece 0: layers 5 and 11
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

import torch

_MOST_GROUPS = 8  # each group costs a step page tables, and copies of them in attention plans
_MOST_GROUPS_OF_TWO_WIDTHS = (
    12  # with 8, Gemma 4 31B would keep pages for 6 layers it does not have
)


class KvPlace(NamedTuple):
    """Location of a layer's keys and values: its group of layers, and its piece of the group's KV
    pages (equal pieces, each for one layer or several narrow ones). Delta nets have none.

    group: index of the group.
    layer: index of the piece in a page.
    part: index of the layer among the layers that share the piece.
    """

    group: int
    layer: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Groups of a model's layers whose keys and values share KV pages.

    page_layers: number of pieces of a page; each holds the keys and values of a layer, or of
        several layers if their keys are narrower than those of other layers.
    windows: each group's window in tokens; None: no window. Groups without windows come first.
        Groups with the same window and the same width of keys are neighbours.
    places: for each layer, the location of the keys and values that it attends to; None for a
        layer that attends to none.
    """

    page_layers: int
    windows: tuple[int | None, ...]
    places: tuple[KvPlace | None, ...]

    @classmethod
    def of(
        cls,
        windows: tuple[int | None, ...],
        context: int,
        have_kv: Sequence[bool] = (),
        widths: Sequence[int] = (),
    ) -> "KvGroups":
        """Choose the groups of layers with which a sequence takes the least memory.

        windows: each layer's window in tokens, None for none; all that are not None are equal. If
            all are None, there is one group.
        context: length of the sequence in tokens.
        have_kv: whether each layer has keys and values; empty: all layers have.
        widths: elements of each layer's keys of a token; empty: all layers have equally many.
        """
        if not all(have_kv):
            kept = tuple(compress(widths, have_kv))
            chosen = cls.of(tuple(compress(windows, have_kv)), context, (), kept)
            held = iter(chosen.places)
            return replace(chosen, places=tuple(next(held) if has else None for has in have_kv))
        layers = [*zip(windows, widths or (1,) * len(windows), strict=True)]
        kinds = sorted(set(layers), key=lambda kind: (kind[0] is not None, -kind[1]))
        count = {kind: layers.count(kind) for kind in kinds}
        piece = math.lcm(*(width for _, width in kinds))

        def capacity(kind: tuple[int | None, int], page_layers: int) -> int:
            """Return the number of layers of a kind that a page holds.

            kind: window and width of keys.
            page_layers: number of pieces of the page.
            """
            return page_layers * (piece // kind[1])

        def groups(kind: tuple[int | None, int], page_layers: int) -> int:
            return -(-count[kind] // capacity(kind, page_layers))

        def tokens(page_layers: int) -> int:
            seen = sum(groups(kind, page_layers) * (kind[0] or context) for kind in kinds)
            return page_layers * seen

        alike = len({width for _, width in kinds}) == 1
        most = _MOST_GROUPS if alike else _MOST_GROUPS_OF_TWO_WIDTHS
        largest = max(-(-count[kind] // capacity(kind, 1)) for kind in kinds)
        sizes = range(largest, 0, -1)  # of equals the one with the fewest groups
        few = (n for n in sizes if sum(groups(kind, n) for kind in kinds) <= most)
        best = min(few, key=tokens)
        first = {kind: sum(groups(k, best) for k in kinds[:i]) for i, kind in enumerate(kinds)}
        places, seen = list[KvPlace](), dict.fromkeys(kinds, 0)
        for kind in layers:
            group, place = divmod(seen[kind], capacity(kind, best))
            places.append(KvPlace(first[kind] + group, *divmod(place, piece // kind[1])))
            seen[kind] += 1
        counted = (kind[0] for kind in kinds for _ in range(groups(kind, best)))
        return cls(best, tuple(counted), tuple(places))

    def read_by(self, owners: Sequence[int]) -> "KvGroups":
        """Return these groups for a model some of whose layers attend to other layers' keys and
        values: each such layer gets its owner's place.

        owners: by layer, the layer whose keys and values it attends to.
        """
        return replace(self, places=tuple(self.places[owner] for owner in owners))


def layer_of_piece(piece: torch.Tensor, kv_heads: int, width: int, part: int) -> torch.Tensor:
    """Return the keys and values of one of the layers that share a piece of KV pages.

    piece [2, pages, page_size, 1, elements]: one piece of all pages.
    kv_heads, width: number and width of the layer's heads.
    part: index of the layer among the layers that share the piece (KvPlace.part).
    → view [2, parts, page_size, kv_heads, width] that begins at the layer's part of page 0. Each
      page has n = elements / (kv_heads · width) parts, so the layer's part of page p is at p · n.
    """
    parts = piece.view(2, -1, piece.shape[2], kv_heads, width)
    return parts[:, part:]
