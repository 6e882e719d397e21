"""Groups of layers that keep their keys and values in the same KV pages.

A layer with a window needs only a sequence's last pages, a layer without a window needs all of
them. So a group consists of layers with the same window, and a sequence has a list of pages for
each group. Pages of all groups hold equally many layers, so that one pool of pages serves all
groups:

    layers              w w w w w F w w w w w F        w: with a window, F: without
    group, place        1·0 1·1 2·0 2·1 3·0 0·0 3·1 4·0 4·1 5·0 5·1 0·1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

_MOST_GROUPS = 8  # each group costs a step page tables, and copies of them in attention plans


class KvPlace(NamedTuple):
    """Location of a layer's keys and values: its group, and its index in the group's pages. Delta
    nets have none.
    """

    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Groups of a model's layers whose keys and values share KV pages.

    page_layers: number of layers whose keys and values a page holds.
    windows: each group's window in tokens; None: no window. Groups without windows come first.
    places: by layer, the layer's group and its index in the group's pages; None for a layer without
        keys and values.
    """

    page_layers: int
    windows: tuple[int | None, ...]
    places: tuple[KvPlace | None, ...]

    @classmethod
    def of(
        cls, windows: tuple[int | None, ...], context: int, have_kv: Sequence[bool] = ()
    ) -> "KvGroups":
        """Choose the groups of layers with which a sequence takes the least memory.

        windows: each layer's window in tokens, None for none; all that are not None are equal. If
            all are None, there is one group.
        context: length of the sequence in tokens.
        have_kv: whether each layer has keys and values; empty: all layers have.
        """
        if not all(have_kv):
            chosen = cls.of(tuple(compress(windows, have_kv)), context)
            held = iter(chosen.places)
            return replace(chosen, places=tuple(next(held) if has else None for has in have_kv))
        kinds = sorted(set(windows), key=lambda window: window is not None)
        layers = {window: windows.count(window) for window in kinds}

        def groups(window: int | None, page_layers: int) -> int:
            return -(-layers[window] // page_layers)

        def tokens(page_layers: int) -> int:
            seen = sum(groups(window, page_layers) * (window or context) for window in kinds)
            return page_layers * seen

        sizes = range(max(layers.values()), 0, -1)  # of equals the one with the fewest groups
        few = (n for n in sizes if sum(groups(window, n) for window in kinds) <= _MOST_GROUPS)
        best = min(few, key=tokens)
        first = {window: sum(groups(w, best) for w in kinds[:i]) for i, window in enumerate(kinds)}
        places, seen = list[KvPlace](), dict.fromkeys(kinds, 0)
        for window in windows:
            group, place = divmod(seen[window], best)
            places.append(KvPlace(first[window] + group, place))
            seen[window] += 1
        counted = (window for window in kinds for _ in range(groups(window, best)))
        return cls(best, tuple(counted), tuple(places))
