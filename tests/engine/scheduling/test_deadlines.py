"""How long requests wait: for their turn, for their adapter, and what is told of it."""

import gc
import time
import weakref
from dataclasses import replace

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import AdapterNotReady, EngineOverloaded
from lorikeet_engine.request import Terms
from tests.engine.driving import PAGE, Answers, build, greedy, prompt
from tests.engine.peft_adapters import BlobShelf, save_adapter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shelf(tmp_path):
    return BlobShelf(tmp_path / "blobs")


@pytest.fixture
def ref(tiny_checkpoints, shelf, tmp_path):
    folder = save_adapter(tiny_checkpoints["llama"], tmp_path / "r4", r=4)
    return shelf.add(folder, "r4")


@pytest.fixture
def make(tiny_checkpoints, shelf, tmp_path):
    """Answers of engines over Llama's tiny checkpoint, closed at the end."""
    engines = []

    def make(**settings):
        engines.append(build(tiny_checkpoints["llama"], shelf, tmp_path / "cache", **settings))
        return Answers(engines[-1])

    yield make
    for engine in engines:
        engine.close()


def on(terms, request):
    return replace(request, terms=terms)


def nothing_is_held(engine):
    live, scheduler = engine.status().live, engine._scheduler
    leases = sum(adapter.leases for adapter in engine.adapters())
    backlog = [account.backlog for account in scheduler._accounts._accounts.values()]
    still_open = [account.open for account in scheduler._accounts._accounts.values()]
    held = (live.running, live.waiting, live.kv_pages_used, leases)
    return not any((*held, *backlog, *still_open))


def test_a_request_that_does_not_begin_in_time_fails_alone(make):
    answers = make(max_running=1, max_batch_tokens=64)
    answers.submit(greedy("runs", prompt(5), max_tokens=100))
    answers.submit(on(Terms(max_queue_s=0.02), greedy("waits", prompt(5), prompt(6), n=2)))
    answers.submit(greedy("patient", prompt(5)))
    answers.all()
    error = answers.errors["waits"]
    assert isinstance(error, EngineOverloaded)
    assert error.retry_after_s >= 1
    assert answers.errors.keys() == {"waits"}
    assert len(answers.of("runs")) == 100
    assert len(answers.of("patient")) == 12
    assert nothing_is_held(answers.engine)


def test_a_request_that_has_begun_is_left_alone_however_many_of_its_choices_wait(make):
    answers = make(max_running=1, max_batch_tokens=64)
    answers.submit(on(Terms(max_queue_s=0.3), greedy("r", prompt(5), max_tokens=100, n=2)))
    answers.step()
    time.sleep(0.3)
    answers.all()
    assert not answers.errors


def test_who_would_wait_far_too_long_is_refused_at_once_and_others_are_not(make):
    answers = make(max_running=2, max_batch_tokens=64)
    noisy, quiet = Terms("noisy", max_queue_s=0.01), Terms("quiet", max_queue_s=0.01)
    for i in range(100):
        answers.submit(on(Terms("noisy"), greedy(f"r{i}", prompt(40), max_tokens=50)))
    for _ in range(20):
        answers.step()
    with pytest.raises(EngineOverloaded) as caught:
        answers.engine.submit(on(noisy, greedy("late", prompt(5))))
    scheduler, rest = answers.engine._scheduler, len(answers.engine._scheduler.waiting)
    assert caught.value.retry_after_s == pytest.approx(scheduler.wait_s(noisy), rel=0.1)
    answers.submit(on(replace(quiet, max_queue_s=None), greedy("next", prompt(5))))
    began_s = time.monotonic()
    answers.until(lambda: answers.errors or answers.finish.get(("next", 0)))
    took_s, ended = time.monotonic() - began_s, rest - len(scheduler.waiting)
    answers.engine.submit(on(quiet, greedy("also", prompt(5))))  # no error: it is next
    assert scheduler.wait_s(noisy) == pytest.approx(took_s * rest / ended, rel=1.0)
    for i in range(100):
        answers.engine.abort(f"r{i}")
    answers.engine.abort("also")
    answers.step()
    answers.step()
    assert nothing_is_held(answers.engine)


def test_an_engine_that_is_not_full_refuses_nobody(make):
    answers = make()
    answers.submit(greedy("r", prompt(40), max_tokens=50))
    answers.step()
    answers.submit(on(Terms(max_queue_s=0.0), greedy("too", prompt(5))))
    assert answers.engine._scheduler.wait_s(Terms()) == 0.0


def test_who_waits_no_longer_for_its_adapter_leaves_the_load_going_on(make, shelf, ref):
    answers = make()
    shelf.hold(ref)
    answers.submit(on(Terms(max_load_s=0.1), greedy("impatient", prompt(5), adapter=ref, n=2)))
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


def test_nor_does_it_matter_that_nobody_else_waits_for_it(make, shelf, ref):
    answers = make()
    shelf.hold(ref)
    answers.submit(on(Terms(max_load_s=0.1), greedy("impatient", prompt(5), adapter=ref)))
    answers.until(lambda: answers.errors)
    shelf.release(ref)
    answers.until(lambda: answers.engine.residency(ref) is Residency.GPU)
    assert nothing_is_held(answers.engine)


def test_an_adapter_that_is_there_is_no_reason_to_fail(make, ref):
    answers = make(max_running=1, max_batch_tokens=64)
    answers.submit(greedy("first", prompt(5), adapter=ref, max_tokens=100))
    answers.until(lambda: answers.tokens)
    answers.submit(on(Terms(max_load_s=0.0), greedy("second", prompt(5), adapter=ref)))
    answers.all()
    assert not answers.errors


def test_deadlines_keep_nobody_in_memory(make):
    answers = make()
    answers.submit(on(Terms(max_queue_s=3600.0), greedy("r", prompt(5))))
    answers.step()
    (running,) = answers.engine._scheduler.running
    sequence, request = weakref.ref(running), running.request
    del running
    answers.all()
    gc.collect()
    assert sequence() is None
    assert gc.get_referrers(request) == [], "nor what it asked"


def course_of(answers, request):
    """The courses on the outputs of a request of one choice, in order, and how long it took."""
    began_s, courses, finish = time.monotonic(), [], None
    answers.engine.submit(request)
    while finish is None:
        answers.engine.wait(5)
        for output in answers.engine.step():
            courses.append(output.course)
            finish = output.finish
    return courses, time.monotonic() - began_s


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_and_the_last_tokens_tell_the_course(make, overlap):
    answers = make(overlap=overlap)
    courses, took_s = course_of(answers, greedy("r", prompt(2 * PAGE + 3)))
    assert [course is not None for course in courses] == [True] + 10 * [False] + [True]
    first, last = courses[0], courses[-1]
    assert (first.cached_tokens, first.preemptions, first.load_s) == (0, 0, 0.0)
    assert first.decode_s == 0.0
    assert (last.queued_s, last.prefill_s) == (first.queued_s, first.prefill_s)
    total_s = last.queued_s + last.prefill_s + last.decode_s
    assert 0.5 * took_s < total_s <= took_s
    assert last.steps == 12
    again, _ = course_of(answers, greedy("r", prompt(2 * PAGE + 3)))
    assert again[0].cached_tokens == 2 * PAGE


def test_the_only_tokens_tell_it_too(make):
    courses, _ = course_of(make(), greedy("r", prompt(5), max_tokens=1))
    assert len(courses) == 1
    assert courses[0].steps == 1


def test_the_course_tells_the_load_from_the_queue(make, shelf, ref):
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
    course = next(o.course for o in outputs if o.request_id == "cold")
    assert 0.2 <= course.load_s < course.queued_s


def test_preemptions_are_told(make):
    answers = make(kv_pages=8, max_context=128)
    for i in range(3):
        answers.engine.submit(greedy(f"r{i}", prompt(30, i), max_tokens=60))
    lasts = []
    while len(lasts) < 3:
        lasts += [output.course for output in answers.engine.step() if output.finish]
    assert sum(course.preemptions for course in lasts) > 0
    assert lasts[0].preemptions == 0, "the oldest never gives way"
