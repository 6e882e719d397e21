"""Recent answers are kept apart by tenant and adapter, within a bound; drafts are found in them."""

from types import SimpleNamespace

import pytest

from lorikeet_engine.request import DraftSource
from lorikeet_engine.scheduling import recent_answers
from lorikeet_engine.scheduling.prompt_lookup import PromptLookup
from lorikeet_engine.scheduling.recent_answers import RecentAnswers

KEY = ("acme", "acme", "d1")


def lookup(prompt, answers):
    return PromptLookup(prompt, 50, answers)


def test_what_followed_in_an_answer_is_predicted_up_to_its_end():
    kept = RecentAnswers()
    kept.add(KEY, [1, 2, 3, 4], [20, 21, 22, 23, 24])
    kept.add(KEY, [1, 2, 3, 4], [30, 31, 32, 33, 34])
    found = lookup([9, 21, 22], kept.of(KEY))
    assert found.predict(8) == [23, 24]
    assert found.source is DraftSource.ANSWERS
    found.extend([23, 24])
    assert found.acceptance == pytest.approx(1 - 0.2 * 15 / 16)
    assert found.predict(8) == []
    found.extend([5])  # no failure: the answer had no token here
    assert found.acceptance == pytest.approx(1 - 0.2 * 15 / 16)


def test_an_answer_is_found_by_the_end_of_its_prompt():
    kept = RecentAnswers()
    kept.add(KEY, [7, 1, 2, 3], [20, 21, 22, 23])
    assert lookup([8, 8, 2, 3], kept.of(KEY)).predict(3) == [20, 21, 22]
    assert 7 not in kept.of(KEY).tokens


def test_the_longer_occurrence_is_followed_the_sequences_own_if_equal():
    kept = RecentAnswers()
    kept.add(KEY, [], [5, 6, 7, 70, 71])
    own = lookup([6, 7, 8, 9, 5, 6, 7], kept.of(KEY))
    assert own.predict(2) == [70, 71]
    assert own.source is DraftSource.ANSWERS
    own = lookup([5, 6, 7, 8, 9, 5, 6, 7], kept.of(KEY))
    assert own.predict(2) == [8, 9]
    assert own.source is DraftSource.LOOKUP


def test_an_answer_begins_with_the_acceptance_of_those_before():
    kept = RecentAnswers()
    answers = kept.add(KEY, [], [5, 6, 7, 8, 9])
    ended = lookup([5, 6], answers)
    ended.predict(0)
    ended.extend([7, 8, 9])
    ended.end(answers)
    following = lookup([5, 6], answers)
    following.predict(0)
    assert ended.acceptance > 0.8
    assert following.acceptance == pytest.approx(0.8 + (ended.acceptance - 0.8) / 4)
    assert following.first_acceptance > 0.5


@pytest.mark.parametrize(
    "other",
    [("b", "acme", "d1"), ("acme", "b", "d1"), ("acme", "acme", "d2"), ("acme", "acme", None)],
)
def test_other_tenants_salts_and_adapters_have_no_part(other):
    kept = RecentAnswers()
    kept.add(KEY, [1, 2], [5, 6, 7, 8, 9])
    assert not len(kept.of(other).tokens)
    assert lookup([1, 2, 5, 6], kept.of(other)).predict(8) == []
    assert kept.of(KEY).acceptance is not kept.of(other).acceptance


def test_the_bytes_are_bounded_and_the_least_recently_used_go_first():
    kept = RecentAnswers(most_bytes=20_000)
    keys = [("t", "t", f"{n}") for n in range(9)]
    for key in keys:
        kept.add(key, [], list(range(500)))
        kept.of(keys[0])
        assert kept.nbytes <= 20_000
        assert kept.nbytes == sum(answers.nbytes for answers in kept._kept.values())
    assert len(kept.of(keys[0]).tokens)
    assert not len(kept.of(keys[1]).tokens)
    for _ in range(40):
        kept.add(keys[0], [], list(range(500)))
    assert len(kept.of(keys[0]).tokens) == recent_answers._ADAPTER_TOKENS


def test_answers_of_a_damaged_adapter_are_forgotten_in_compositions_too():
    kept, both = RecentAnswers(), ("acme", "acme", "d1*1+d2*1")
    held = [kept.add(key, [], [5, 6, 7, 8]) for key in (KEY, both, ("acme", "acme", "d2"))]
    kept.forget_adapter("d1")
    assert [len(answers.tokens) for answers in held] == [0, 0, 5]
    assert list(kept._kept) == [("acme", "acme", "d2")]


def test_answers_unused_for_ten_minutes_are_dropped(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(recent_answers, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    kept = RecentAnswers()
    retired = kept.add(KEY, [], [5, 6, 7, 8])
    clock.now_s = 599.0
    kept.add(("b", "b", "d2"), [], [5, 6, 7, 8])
    assert len(retired.tokens)
    clock.now_s = 601.0
    kept.of(("b", "b", "d2"))
    assert not len(retired.tokens)
