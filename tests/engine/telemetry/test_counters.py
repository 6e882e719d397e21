"""Counters of an engine equal its work."""

import json
import pickle
import time
from pathlib import Path

import pytest

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import InvalidRequest, StepFailed
from lorikeet_engine.telemetry.counters import Histogram
from lorikeet_engine.telemetry.status import Distribution
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, build, greedy, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

GPU, HOST, DISK, REMOTE = Residency.GPU, Residency.HOST, Residency.DISK, Residency.REMOTE


@pytest.fixture
def shape(tiny_checkpoints) -> BaseShape:
    config = (tiny_checkpoints["llama"] / "config.json").read_text()
    return BaseShape.from_config(json.loads(config))


@pytest.fixture
def refs(tmp_path, shape) -> tuple[Shelf, list[AdapterRef]]:
    shelf = Shelf(tmp_path / "remote")
    return shelf, [shelf.make(name, {(0, 0): 4, (1, 6): 4}, shape=shape) for name in "abc"]


@pytest.fixture
def make(tiny_checkpoints, refs, tmp_path, close_later):
    def make(**settings) -> Engine:
        shelf, _ = refs
        return close_later(build(tiny_checkpoints["llama"], shelf, tmp_path / "cache", **settings))

    return make


def counted(distribution: Distribution) -> int:
    return sum(distribution.counts)


def gaps(engine: Engine) -> dict[Residency | None, int]:
    between = engine.status().inter_token_s
    return {found: n for found, each in between.items() if (n := counted(each))}


def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed():
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 1.5, 2, 4, 5, 9):
        histogram.add(value)
    assert histogram.read() == Distribution((1, 2, 4), (2, 2, 1, 2), 23.0)


def test_lookups_and_inter_token_times_are_counted_by_the_adapters_tier(make, refs):
    engine, (a, b, _) = make(), refs[1]
    answers = Answers(engine)
    assert engine.submit(greedy("cold", prompt(5), adapter=a, max_tokens=4)) is REMOTE
    answers.pending["cold"] = 1
    answers.all()
    for name, ref in (("hit", a), ("again", a), ("other", b), ("base", None)):
        answers.submit(greedy(name, prompt(5), adapter=ref, max_tokens=4))
        answers.all()
    assert engine.status().lookups == {REMOTE: 2, DISK: 0, HOST: 0, GPU: 2}
    assert gaps(engine) == {REMOTE: 6, GPU: 6, None: 3}


def test_a_refused_request_counts_as_no_lookup(make, refs):
    engine = make()
    with pytest.raises(InvalidRequest):
        engine.submit(greedy("long", prompt(4000), adapter=refs[1][0]))
    assert not any(engine.status().lookups.values())


def test_prompt_cached_and_output_tokens_are_counted(make):
    answers = Answers(make())
    shared = prompt(2 * PAGE)
    for name in ("first", "second"):
        answers.submit(greedy(name, shared + prompt(3), salt="acme", max_tokens=5))
        answers.all()
    status = answers.engine.status()
    assert (status.prompt_tokens, status.cached_tokens) == (2 * (2 * PAGE + 3), 2 * PAGE)
    assert status.output_tokens == sum(map(len, answers.tokens.values())) == 10


def test_a_stop_token_is_no_output(make):
    answers = Answers(make())
    answers.submit(greedy("all", prompt(9), max_tokens=6))
    answers.all()
    stop = answers.of("all")[3]
    first = answers.of("all").index(stop)
    answers.submit(greedy("cut", prompt(9), max_tokens=6, stop_token_ids=(stop,)))
    answers.all()
    status = answers.engine.status()
    assert status.output_tokens == 6 + first
    assert gaps(answers.engine) == {None: 5 + max(0, first - 1)}


def test_steps_are_counted_with_their_sequences_and_distinct_adapters(make, refs):
    engine, (a, b, _) = make(), refs[1]
    witness, answers = RecordingRunner(engine), Answers(engine)
    for ref in (a, b):
        engine.pin(ref)
    answers.until(lambda: all(engine.residency(ref) is GPU for ref in (a, b)))
    for name, ref in (("a", a), ("a2", a), ("b", b), ("base", None)):
        answers.submit(greedy(name, prompt(5), adapter=ref, max_tokens=3))
    began_s = time.perf_counter()
    answers.all()
    took_s = time.perf_counter() - began_s
    status, steps = engine.status(), len(witness.batches)
    assert steps == counted(status.step_s) == counted(status.step_sequences) == 3
    assert status.step_sequences.total == sum(len(b.kv_lengths) for b in witness.batches) == 12
    assert status.step_adapters.total == 2 * steps
    assert 0 < status.step_s.total <= took_s
    assert (status.live.running, status.live.waiting, status.live.kv_pages_used) == (0, 0, 0)


def test_preemptions_are_counted_and_their_tokens_only_once(make):
    answers = Answers(make(kv_pages=8, max_context=128))
    for i in range(4):
        answers.submit(greedy(f"r{i}", prompt(30, i), max_tokens=60))
    preempted = []
    while answers.pending:
        answers.step()
        preempted.append(answers.engine.status().preemptions)
    status = answers.engine.status()
    assert preempted[-1] > 0
    assert preempted == sorted(preempted)
    assert status.prompt_tokens == 4 * 30
    assert status.output_tokens == 4 * 60


def test_waiting_running_and_pages_are_current_values(make):
    answers = Answers(make(max_running=2, kv_pages=16))
    for i in range(3):
        answers.submit(greedy(f"r{i}", prompt(PAGE + 1, i), max_tokens=8))
    assert answers.engine.status().live.waiting == 3
    answers.step()
    live = answers.engine.status().live
    assert (live.running, live.waiting) == (2, 1)
    assert (live.kv_pages_used, live.kv_pages_total) == (4, 16)


def test_counts_survive_fail_all(make):
    answers = Answers(make())
    answers.submit(greedy("before", prompt(5), max_tokens=3))
    answers.all()
    before = answers.engine.status()
    answers.submit(greedy("lost", prompt(5), max_tokens=3))
    answers.step()
    answers.engine.fail_all(StepFailed("the engine began anew"))
    after = answers.engine.status()
    assert after.output_tokens == before.output_tokens
    assert after.prompt_tokens == before.prompt_tokens + 5


def test_the_message_is_small_however_many_adapters_there_are(make, tmp_path):
    few = len(pickle.dumps(make().status()))
    folder = Path(tmp_path / "cache")
    for n in range(2_000):
        (folder / f"{n:064x}").touch()
    many = make().status()
    assert many.tiers[DISK].adapters == 2_000
    assert abs(len(pickle.dumps(many)) - few) < 100
    assert few < 8_000
