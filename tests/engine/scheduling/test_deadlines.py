"""Deadlines in the queue and for adapters, and the timings that are reported."""

import gc
import time
import weakref
from dataclasses import replace

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import AdapterNotReady, EngineOverloaded
from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.scheduling.deadlines import Deadlines
from tests.engine.engine_driver import PAGE, Answers, build, greedy, prompt
from tests.engine.peft_adapters import save_adapter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["llama", "qwen3_5_text"])
def family(request):
    return request.param


@pytest.fixture
def ref(family, tiny_checkpoints, shelf, tmp_path):
    targets = ["q_proj", "v_proj", "in_proj_qkv"]
    folder = save_adapter(tiny_checkpoints[family], tmp_path / "r4", r=4, target_modules=targets)
    return shelf.add(folder, "r4")


@pytest.fixture
def make(family, tiny_checkpoints, shelf, tmp_path, close_later):
    """Answers of engines over the family's tiny checkpoint, closed at the end."""

    def make(**settings):
        engine = build(tiny_checkpoints[family], shelf, tmp_path / "cache", **settings)
        return Answers(close_later(engine))

    return make


def on(scheduling, request):
    return replace(request, scheduling=scheduling)


def nothing_is_held(engine):
    status, scheduler = engine.status(), engine._scheduler
    live, states = status.live, status.states.running if status.states else 0
    leases = sum(adapter.leases for adapter in engine.adapters())
    backlog = [counter.backlog for counter in scheduler._tenants._counters.values()]
    still_open = [counter.open for counter in scheduler._tenants._counters.values()]
    held = (live.running, live.waiting, live.kv_pages_used, states, leases)
    return not any((*held, *backlog, *still_open))


def test_only_the_request_that_does_not_begin_in_time_fails(make):
    answers = make(max_running=1, max_batch_tokens=64)
    answers.submit(greedy("runs", prompt(5), max_tokens=100))
    answers.submit(
        on(SchedulingParams(max_queue_s=0.02), greedy("waits", prompt(5), prompt(6), n=2))
    )
    answers.submit(greedy("patient", prompt(5)))
    answers.all()
    error = answers.errors["waits"]
    assert isinstance(error, EngineOverloaded)
    assert error.retry_after_s >= 1
    assert answers.errors.keys() == {"waits"}
    assert len(answers.of("runs")) == 100
    assert len(answers.of("patient")) == 12
    assert nothing_is_held(answers.engine)


def test_a_request_that_has_begun_meets_its_deadline_though_some_of_its_choices_wait(make):
    answers = make(max_running=1, max_batch_tokens=64)
    answers.submit(
        on(SchedulingParams(max_queue_s=0.3), greedy("r", prompt(5), max_tokens=100, n=2))
    )
    answers.step()
    time.sleep(0.3)
    answers.all()
    assert not answers.errors


def test_a_request_that_would_wait_far_too_long_is_refused_at_once(make):
    answers = make(max_running=2, max_batch_tokens=64)
    noisy, quiet = (
        SchedulingParams("noisy", max_queue_s=0.01),
        SchedulingParams("quiet", max_queue_s=0.01),
    )
    for i in range(100):
        answers.submit(on(SchedulingParams("noisy"), greedy(f"r{i}", prompt(40), max_tokens=50)))
    for _ in range(20):
        answers.step()
    with pytest.raises(EngineOverloaded) as caught:
        answers.engine.submit(on(noisy, greedy("late", prompt(5))))
    scheduler, rest = answers.engine._scheduler, len(answers.engine._scheduler.waiting)
    assert caught.value.retry_after_s == 1
    answers.submit(on(replace(quiet, max_queue_s=None), greedy("next", prompt(5))))
    began_s = time.monotonic()
    answers.until(lambda: answers.errors or answers.finish.get(("next", 0)))
    answers.until(lambda: len(scheduler.waiting) <= rest - 4)
    took_s, ended = time.monotonic() - began_s, rest - len(scheduler.waiting)
    answers.engine.submit(on(quiet, greedy("also", prompt(5))))  # no error, as this request is next
    assert scheduler.wait_s(noisy) == pytest.approx(took_s * rest / ended, rel=1.0)
    for i in range(100):
        answers.engine.abort(f"r{i}")
    answers.engine.abort("also")
    answers.step()
    answers.step()
    assert nothing_is_held(answers.engine)


@pytest.mark.parametrize("wait_s", [120.1, 1000.0])
def test_retry_after_of_a_refusal_is_when_all_waiting_requests_have_begun_or_failed(wait_s):
    deadlines = Deadlines(lambda params: wait_s, lambda ref: 0.0)
    with pytest.raises(EngineOverloaded, match="send it again in 60 s") as refused:
        deadlines.check(SchedulingParams(max_queue_s=60.0))
    assert refused.value.retry_after_s == 60.0
    deadlines.check(SchedulingParams(max_queue_s=0.6 * wait_s))


def test_the_error_of_a_missed_deadline_names_the_missing_time_in_whole_seconds():
    deadlines = Deadlines(lambda params: 71.2, lambda ref: 0.0)
    params = SchedulingParams(max_queue_s=60.0)
    error = deadlines._queue_error(on(params, greedy("r", prompt(5))))
    assert error.retry_after_s == pytest.approx(11.2)
    assert "send it again in 12 s" in error.message


def test_an_engine_that_is_not_full_refuses_no_request(make):
    answers = make()
    answers.submit(greedy("r", prompt(40), max_tokens=50))
    answers.step()
    answers.submit(on(SchedulingParams(max_queue_s=0.0), greedy("too", prompt(5))))
    assert answers.engine._scheduler.wait_s(SchedulingParams()) == 0.0


def test_an_adapter_goes_on_loading_after_its_request_missed_its_deadline(make, shelf, ref):
    answers = make()
    shelf.hold(ref)
    answers.submit(
        on(SchedulingParams(max_load_s=0.1), greedy("impatient", prompt(5), adapter=ref, n=2))
    )
    answers.submit(greedy("patient", prompt(5), adapter=ref))
    answers.submit(greedy("base", prompt(5)))
    answers.until(lambda: answers.errors)
    error = answers.errors["impatient"]
    assert isinstance(error, AdapterNotReady)
    assert error.retry_after_s >= 1
    assert answers.errors.keys() == {"impatient"}
    shelf.release(ref)
    answers.all()
    assert len(answers.of("patient")) == len(answers.of("base")) == 12
    assert answers.engine.residency(ref) is Residency.GPU
    assert nothing_is_held(answers.engine)


def test_a_request_without_its_adapter_by_max_queue_s_gets_adapter_not_ready(make, shelf, ref):
    answers = make()
    shelf.hold(ref)
    answers.submit(on(SchedulingParams(max_queue_s=0.1), greedy("r", prompt(5), adapter=ref)))
    answers.until(lambda: answers.errors)
    shelf.release(ref)
    error = answers.errors["r"]
    assert isinstance(error, AdapterNotReady)
    assert str(ref) in error.message
    assert error.retry_after_s >= 1


def test_an_adapter_goes_on_loading_when_no_request_waits_for_it(make, shelf, ref):
    answers = make()
    shelf.hold(ref)
    answers.submit(
        on(SchedulingParams(max_load_s=0.1), greedy("impatient", prompt(5), adapter=ref))
    )
    answers.until(lambda: answers.errors)
    shelf.release(ref)
    answers.until(lambda: answers.engine.residency(ref) is Residency.GPU)
    assert nothing_is_held(answers.engine)


def test_a_request_for_a_loaded_adapter_meets_max_load_s(make, ref):
    answers = make(max_running=1, max_batch_tokens=64)
    answers.submit(greedy("first", prompt(5), adapter=ref, max_tokens=100))
    answers.until(lambda: answers.tokens)
    answers.submit(on(SchedulingParams(max_load_s=0.0), greedy("second", prompt(5), adapter=ref)))
    answers.all()
    assert not answers.errors


def test_deadlines_keep_no_sequence_in_memory(make):
    answers = make()
    answers.submit(on(SchedulingParams(max_queue_s=3600.0), greedy("r", prompt(5))))
    answers.step()
    (running,) = answers.engine._scheduler.running
    sequence, request = weakref.ref(running), running.request
    del running
    answers.all()
    gc.collect()
    assert sequence() is None
    assert gc.get_referrers(request) == [], "nor what it asked"


def timings_of(answers, request):
    """Return the timings of a one-choice request's outputs in order, and its seconds in all."""
    began_s, timings, finish = time.monotonic(), [], None
    answers.engine.submit(request)
    while finish is None:
        answers.engine.wait(5)
        for output in answers.engine.step():
            timings.append(output.timings)
            finish = output.finish
    return timings, time.monotonic() - began_s


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_and_the_last_tokens_carry_timings(make, overlap):
    answers = make(overlap=overlap)
    timings, took_s = timings_of(answers, greedy("r", prompt(4 * PAGE + 3)))
    assert [one is not None for one in timings] == [True] + 10 * [False] + [True]
    first, last = timings[0], timings[-1]
    assert (first.cached_tokens, first.preemptions, first.load_s) == (0, 0, 0.0)
    assert first.decode_s == 0.0
    assert (last.queued_s, last.prefill_s) == (first.queued_s, first.prefill_s)
    total_s = last.queued_s + last.prefill_s + last.decode_s
    assert 0.5 * took_s < total_s <= took_s
    assert last.steps == 12
    again, _ = timings_of(answers, greedy("r", prompt(4 * PAGE + 3)))
    assert again[0].cached_tokens == 4 * PAGE


def test_the_only_output_of_a_choice_carries_timings(make):
    timings, _ = timings_of(make(), greedy("r", prompt(5), max_tokens=1))
    assert len(timings) == 1
    assert timings[0].steps == 1


def test_timings_separate_the_load_from_the_queue(make, shelf, ref):
    answers = make(max_running=1, max_batch_tokens=64)
    shelf.hold(ref)
    answers.submit(greedy("cold", prompt(5), adapter=ref))
    answers.step()
    time.sleep(0.2)
    answers.submit(greedy("ahead", prompt(5), max_tokens=100))
    answers.step()
    shelf.release(ref)
    outputs = []
    while not any(o.request_id == "cold" and o.finish for o in outputs):
        answers.engine.wait(5)
        outputs += answers.engine.step()
    timings = next(o.timings for o in outputs if o.request_id == "cold")
    assert 0.2 <= timings.load_s < timings.queued_s


def test_timings_count_preemptions(make):
    answers = make(kv_pages=8, max_context=128)
    for i in range(3):
        answers.engine.submit(greedy(f"r{i}", prompt(30, i), max_tokens=60))
    lasts = []
    while len(lasts) < 3:
        lasts += [output.timings for output in answers.engine.step() if output.finish]
    assert sum(timings.preemptions for timings in lasts) > 0
    assert lasts[0].preemptions == 0, "the oldest never gives way"
