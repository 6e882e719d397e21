"""A seed gives the same tokens whatever runs beside it, on a CPU in float32."""

from dataclasses import replace

import pytest

from lorikeet_engine.request import Request, SamplingParams, SchedulingParams
from tests.engine.engine_driver import Answers, prompt
from tests.engine.tiny_engine import SETTINGS, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = (
    {"temperature": 0.9},
    {"top_k": 50, "top_p": 0.95},
    {"min_p": 0.05},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2, "logit_bias": ((7, 2.0), (9, -3.0)), "top_p": 0.9},
)
PAGE_BYTES = 2 * 4 * 2 * 16 * 2 * 16  # keys and values, float32, layers, tokens, heads, width
TOKENS = 20


def seeded(way, name="", tokens=TOKENS):
    sampling = SamplingParams(max_tokens=tokens, seed=11, ignore_eos=True, **WAYS[way])
    return Request(f"{name}{way}", (tuple(prompt(62)),), sampling)


def other(i):
    """Request with its own prompt and seed."""
    way = WAYS[i % len(WAYS)]
    sampling = SamplingParams(max_tokens=2 * TOKENS, seed=i, ignore_eos=True, **way)
    return Request(f"other {i}", (tuple(prompt(3 + i % 7, i)),), sampling)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    engines = []

    def make(**settings):
        folder = tmp_path_factory.mktemp("engine")
        sizes = {"max_batch_tokens": 256, **settings}  # such steps are measured at the start
        engines.append(tiny_engine(folder, settings=replace(SETTINGS, **sizes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(make):
    """Return the answers of each way in an engine of its own."""
    said = []
    for way in range(len(WAYS)):
        answers = Answers(make())
        answers.submit(seeded(way))
        answers.all()
        said.append(answers.of(f"{way}"))
    return said


def one_after_another(engine):
    answers = Answers(engine)
    for way in range(len(WAYS)):
        answers.submit(seeded(way))
        answers.all()
    return [answers.of(f"{way}") for way in range(len(WAYS))]


def in_a_batch_of_256(make):
    engine = make(max_running=256, max_batch_tokens=2048)
    answers = Answers(engine)
    for i in range(256 - len(WAYS)):
        answers.submit(other(i))
        if i % 50 == 0 and i // 50 < len(WAYS):
            answers.submit(seeded(i // 50))
    answers.until(lambda: engine.status().live.running == 256)
    names = {f"{way}" for way in range(len(WAYS))}
    answers.until(lambda: not names & answers.pending.keys(), timeout_s=200)
    return [answers.of(name) for name in sorted(names)]


def after_a_preemption(make):
    engine = make(kv_bytes=7 * PAGE_BYTES)  # the first needs 6 pages, the second 3 others
    answers = Answers(engine)
    for way in range(len(WAYS)):
        before = engine.status().preemptions
        answers.submit(seeded(way, "first ", tokens=30))
        answers.submit(seeded(way))
        answers.all()
        assert engine.status().preemptions > before
    return [answers.of(f"{way}") for way in range(len(WAYS))]


def with_a_prefix_hit(make):
    engine = make()
    one_after_another(engine)
    before = engine.status().cached_tokens
    tokens = one_after_another(engine)
    assert engine.status().cached_tokens >= before + 48 * len(WAYS)
    return tokens


@pytest.mark.parametrize("company", [in_a_batch_of_256, after_a_preemption, with_a_prefix_hit])
def test_a_seed_gives_the_same_tokens_as_alone(make, alone, company):
    assert company(make) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(WAYS)


def test_pauses_and_preemptions_in_the_background_change_no_tokens(make, alone):
    answers = Answers(make(max_running=4, kv_bytes=24 * PAGE_BYTES))
    behind = SchedulingParams("acme", background=True)
    for way in range(len(WAYS)):
        answers.submit(replace(seeded(way), scheduling=behind))
    preempted = 0
    for i in range(12):
        for _ in range(3):
            answers.step()
            waiting = answers.engine._scheduler.waiting
            preempted += sum(s.timings.preemptions for s in waiting if s.background)
        answers.submit(other(i))
    answers.all()
    assert [answers.of(f"{way}") for way in range(len(WAYS))] == alone
    assert preempted > 0
    assert answers.engine.status().preemptions == 0, "it gives way by design: nothing lacks memory"
