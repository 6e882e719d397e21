"""Layers share pages so that a long sequence takes little more than what its windows need."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.models.kv_groups import KvGroups

GEMMA_3 = {  # layers, window, every so many layers one without
    "1b": (26, 512, 6, 32_768),
    "4b": (34, 1024, 6, 131_072),
    "12b": (48, 1024, 6, 131_072),
    "27b": (62, 1024, 6, 131_072),
}


def every(count, window, pattern):
    return tuple(None if (i + 1) % pattern == 0 else window for i in range(count))


@pytest.mark.parametrize("windows", [(None,) * 32, (4096,) * 32, (None,), (1,)])
def test_layers_of_one_kind_are_one_group(windows):
    groups = KvGroups.of(windows, 32_768)
    assert groups.page_layers == len(windows)
    assert groups.windows == windows[:1]
    assert [place.layer for place in groups.places] == list(range(len(windows)))
    assert {place.group for place in groups.places} == {0}


@pytest.mark.parametrize(
    ("name", "page_layers", "windowed"), [("1b", 4, 6), ("4b", 5, 6), ("12b", 8, 5), ("27b", 10, 6)]
)
def test_gemma_3_has_one_group_without_a_window(name, page_layers, windowed):
    layers, window, pattern, context = GEMMA_3[name]
    groups = KvGroups.of(every(layers, window, pattern), context)
    assert groups.page_layers == page_layers
    assert groups.windows == (None, *[window] * windowed)


@pytest.mark.parametrize(
    ("layers", "windowed", "full", "pieces", "groups"),
    [(60, 16 * 256, 4 * 512, 5, 10), (30, 8 * 256, 2 * 512, 3, 9), (60, 512, 512, 10, 5)],
)
def test_gemma_4_keeps_no_pages_for_layers_it_does_not_have(layers, windowed, full, pieces, groups):
    windows = every(layers, 1024, 6)
    widths = [full if window is None else windowed for window in windows]
    chosen = KvGroups.of(windows, 262_144, (), widths)
    assert (chosen.page_layers, chosen.windows) == (pieces, (None, *[1024] * groups))
    of_full = [place for place, window in zip(chosen.places, windows, strict=True) if not window]
    assert {place.part for place in of_full} == set(range(windowed // full))


@pytest.mark.parametrize("layers", [26, 42, 46])
def test_gemma_2_has_a_group_of_each_kind(layers):
    groups = KvGroups.of(every(layers, 4096, 2), 8192)
    assert (groups.page_layers, groups.windows) == (layers // 2, (None, 4096))


@settings(deadline=None)
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=80),
    window=st.integers(1, 4096),
    context=st.integers(4097, 200_000),
    two=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3), (16, 24)]),
)
def test_every_layer_has_a_place_of_its_own_among_layers_of_its_window(kinds, window, context, two):
    windows = tuple(window if windowed else None for windowed in kinds)
    widths = [two[windowed] for windowed in kinds]
    groups = KvGroups.of(windows, context, (), widths)
    assert len(set(groups.places)) == len(windows) == len(groups.places)
    assert len(groups.windows) <= (8 if len({*widths}) == 1 else 12)
    for place, width in zip(groups.places, widths, strict=True):
        assert (place.part + 1) * width <= math.lcm(*widths)
    assert list(groups.windows) == sorted(groups.windows, key=lambda w: w is not None)
    for place, of_layer in zip(groups.places, windows, strict=True):
        assert groups.windows[place.group] == of_layer
        assert 0 <= place.layer < groups.page_layers
    assert {place.group for place in groups.places} == set(range(len(groups.windows)))


def test_layers_that_follow_one_another_share_a_group():
    """Attention then changes from one group's pages to another's only a few times a step."""
    groups = [place.group for place in KvGroups.of(every(48, 1024, 6), 131_072).places]
    windowed = [group for group in groups if group]
    assert windowed == sorted(windowed)
