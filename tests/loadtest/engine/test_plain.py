"""Plain path: accepts an engine's tokens, and rejects wrong ones, many requests at a time."""

from dataclasses import replace

import pytest
import torch

from loadtest.engine import plain
from loadtest.engine.offline import generate
from loadtest.engine.plain import Answer
from loadtest.engine.random_adapters import Targets, random_refs
from tests.engine.engine_driver import greedy, prompt
from tests.engine.tiny_engine import SETTINGS, tiny_engine

FIRST, SECOND = random_refs(2)
ADAPTERS = [None, FIRST, *random_refs(1, Targets.LINEARS_AND_HEAD), SECOND]


def started(folder, **settings):
    return tiny_engine(
        folder,
        adapters=2,
        room=1,
        others={Targets.LINEARS_AND_HEAD: 1},
        settings=replace(SETTINGS, **settings),
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = started(tmp_path_factory.mktemp("plain"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Engine of two ranks, in which a prompt takes several chunks of the largest step."""
    folder = tmp_path_factory.mktemp("shared")
    engine = started(folder, tensor_parallel=2, max_batch_tokens=24)
    yield engine
    engine.close()


def answers_of(engine):
    """Return answers of odd lengths, with no adapter or one of three (more than fit the device)."""
    requests = [
        greedy(f"r{i}", prompt(1 + 13 * i, i), adapter=ADAPTERS[i % 4], max_tokens=1 + 5 * i)
        for i in range(7)
    ]
    return generate(engine, requests).answers


@pytest.fixture(scope="module")
def answers(engine):
    return answers_of(engine)


def test_an_engines_tokens_equal_the_plain_paths(engine, answers):
    assert plain.check(engine, answers) < 1e-5


def test_logits_do_not_depend_on_other_answers(engine, answers):
    model, tiers = engine._runner.model, engine._tiers
    answers = [answer for answer in answers if answer.request.adapter != ADAPTERS[3]]
    together = plain.plain_logits(model, tiers, answers)
    for answer, logits in zip(answers, together, strict=True):
        torch.testing.assert_close(plain.plain_logits(model, tiers, [answer])[0], logits)
        assert logits.argmax(-1).tolist() == answer.tokens


def test_answers_that_do_not_fit_at_once_are_checked_in_groups(engine, answers, monkeypatch):
    model, tiers = engine._runner.model, engine._tiers
    wrong = [replace(a, tokens=[(t + i) % 256 for t in a.tokens]) for i, a in enumerate(answers)]
    at_once = plain.shortfalls(model, tiers, wrong)
    monkeypatch.setattr(plain, "_ROWS", 20)
    assert plain.shortfalls(model, tiers, wrong) == pytest.approx(at_once)
    assert at_once[0] < 1e-5
    assert min(at_once[1:]) > 0.1


def test_one_wrong_token_is_found_and_its_request_named(engine, answers):
    spoilt = replace(answers[5], tokens=[*answers[5].tokens[:9], 3, *answers[5].tokens[10:]])
    with pytest.raises(AssertionError, match="r5"):
        plain.check(engine, [answers[0], spoilt])


def test_tokens_of_ranks_equal_the_plain_paths_and_wrong_tokens_are_found(shared):
    answers = answers_of(shared)
    assert plain.check(shared, answers) < 1e-5
    assert shared.status().live.kv_pages_used == 0
    wrong = replace(answers[6], tokens=[*answers[6].tokens[:29], 3, *answers[6].tokens[30:]])
    mistaken = Answer(replace(answers[4].request, adapter=ADAPTERS[2]), answers[4].tokens)
    for spoilt in (wrong, mistaken):
        with pytest.raises(AssertionError, match=spoilt.request.request_id):
            plain.check(shared, [answers[0], spoilt])
    assert answers_of(shared) == answers, "the engine goes on"


def test_nan_logits_of_ranks_are_found(shared):
    answers = answers_of(shared)
    shared._runner.model._norm.weight[3] = torch.nan
    with pytest.raises(AssertionError, match="nan under"):
        plain.check(shared, answers[:1])


def test_tokens_of_the_wrong_adapter_are_found(engine, answers):
    mistaken = Answer(replace(answers[4].request, adapter=ADAPTERS[2]), answers[4].tokens)
    with pytest.raises(AssertionError, match="r4"):
        plain.check(engine, [mistaken])


@pytest.mark.parametrize("requests", [3, 8, 128, 256, 1024])
def test_some_answers_cover_the_run_and_different_adapters(requests):
    chosen = plain.some(range(requests))
    assert len(chosen) == len({i % 8 for i in chosen}) == min(8, requests)
    assert max(chosen) >= 7 * requests // 8 - 1 or requests < 8


def test_the_tolerance_follows_the_dtype():
    assert plain.tolerance(torch.bfloat16) == 0.0625
    assert plain.tolerance(torch.float32) == 1e-4
