"""Prompt lookup predicts what followed the last tokens before, from one sequence alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet_engine.scheduling import prompt_lookup
from lorikeet_engine.scheduling.prompt_lookup import PromptLookup


def predicted(tokens, most=3):
    return PromptLookup(tokens, 0).predict(most)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ((1, 2, 3, 4, 5, 1, 2), [3, 4, 5]),
        ((1, 2, 3, 4, 5, 2), []),  # one token alone tells nothing
        ((1, 2, 3, 4, 5, 6), []),
        ((1, 2), []),
        ((1,), []),
        ((9, 1, 2, 7, 8, 1, 2, 5, 6, 1, 2), [5, 6, 1]),  # the latest
        ((9, 1, 2, 7, 8, 4, 1, 2, 5, 6, 9, 1, 2), [7, 8, 4]),  # the longest
        ((4, 7, 7), []),
        ((4, 7, 7, 7), [7, 7, 7]),  # more than followed before
        ((5, 6, 5, 6, 5), [6, 5, 6]),
    ],
)
def test_what_followed_the_longest_latest_occurrence_is_predicted(tokens, want):
    assert predicted(tokens) == want


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_predictions_equal_those_of_a_plain_search(tokens, most):
    want = []
    for length in range(4, 1, -1):
        last = tokens[-length:]
        begins = [i for i in range(len(tokens) - length) if tokens[i : i + length] == last]
        if len(tokens) > length and begins:
            followed = tokens[begins[-1] + length :][:most]
            want = (followed * most)[:most]
            break
    assert predicted(tokens, most) == want


def test_a_prediction_that_comes_true_goes_on_without_a_search(monkeypatch):
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 1, 2], 9)
    assert lookup.predict(2) == [3, 4]
    monkeypatch.setattr(PromptLookup, "_found", None)
    lookup.extend([3])
    assert lookup.predict(2) == [4, 5]
    lookup.extend([4, 5, 6])
    assert lookup.predict(2) == [1, 2]


def test_the_acceptance_is_that_of_predictions_drafted_or_not():
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 1, 2], 9)
    lookup.extend([9])  # nothing was predicted
    assert (lookup.first_acceptance, lookup.acceptance) == (0.5, 0.8)
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 1, 2], 9)
    lookup.predict(0)
    lookup.extend([3])
    assert lookup.first_acceptance == lookup.acceptance == 0.8  # of a token after one that came
    lookup.extend([4])
    assert lookup.acceptance == pytest.approx(1 - 0.2 * 15 / 16)
    lookup.extend([9])
    assert lookup.acceptance == pytest.approx((1 - 0.2 * 15 / 16) * 15 / 16)
    assert lookup.predict(3) == []
    lookup.extend([1, 2])
    assert lookup.predict(1) == [3]  # after an occurrence, 3 came true once
    assert lookup.first_acceptance == pytest.approx(1 - 0.5 * 7 / 8)


@pytest.mark.parametrize("pause", [0, 2, 8])
def test_searches_become_rare_where_nothing_is_found_and_many_search(pause, monkeypatch):
    searches = []
    monkeypatch.setattr(PromptLookup, "_found", lambda lookup: searches.append(lookup._length))
    lookup = PromptLookup(range(10), 200)
    for token in range(10, 210):
        lookup.predict(1, pause)
        lookup.extend([token])
    assert searches[:2] == [10, 11]
    assert 200 / (1 + pause) <= len(searches) < 200 / (1 + pause) + 10


def test_only_the_latest_tokens_are_searched(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_WINDOW", 6)
    assert predicted((1, 2, 3, 4, 5, 1, 2), 1) == []
    assert predicted((0, 1, 2, 3, 4, 1, 2), 1) == [3]
    lookup = PromptLookup([1, 2, 3, 4, 5, 1], 9)
    lookup.extend([2, 3, 9, 1, 2])
    assert lookup.predict(2) == [3, 9]
