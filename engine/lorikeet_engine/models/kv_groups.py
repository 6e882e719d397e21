"""Which layers keep their keys and values in the same KV pages.

A layer with a window needs a sequence's last pages alone, one without needs all of them. So layers
are put into groups of one window each, and a sequence has a list of pages for each group. Pages of
all groups have room for equally many layers, so that one pool of pages serves them all:

    layers              w w w w w F w w w w w F        w: with a window, F: without
    group, place        1·0 1·1 2·0 2·1 3·0 0·0 3·1 4·0 4·1 5·0 5·1 0·1
"""

from dataclasses import dataclass
from typing import NamedTuple

_MOST_GROUPS = 8  # a step lays out pages of each, and a plan for attention copies them


class KvPlace(NamedTuple):
    """Where a layer's keys and values are: its group, and its place in the group's pages."""

    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The groups of a model's layers.

    page_layers: how many layers' keys and values a page has room for. windows: of each group, None
    for those whose tokens see all, which come first. places: of each layer.
    """

    page_layers: int
    windows: tuple[int | None, ...]
    places: tuple[KvPlace, ...]

    @classmethod
    def of(cls, windows: tuple[int | None, ...], context: int) -> "KvGroups":
        """The groups by which a sequence of `context` tokens takes the least memory.

        windows: of each layer; all that are not None are one. Without any there is one group.
        """
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
