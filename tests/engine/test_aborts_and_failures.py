"""Aborts and failures at every step of a set of requests, and work saved by shared prefixes.

The requests wait at some time for each resource: an adapter, KV pages, another's prefix, capacity
in a batch, the tokens of a step in flight.
"""

import pytest

from lorikeet_engine.errors import StepFailed
from lorikeet_engine.execution import batch_builder
from lorikeet_engine.request import Request, SamplingParams
from lorikeet_engine.scheduling.kv_cache import KVCache
from tests.engine.checked_engine import ADAPTER_BYTES, BROKEN, GOOD, OTHER, CheckedEngine
from tests.engine.hash_model import PAGE

pytestmark = pytest.mark.usefixtures("one_thread")

LOAD_EVERY = 3  # steps between two pieces of loading
STRIDES = [pytest.param(11, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)]


@pytest.fixture
def make_checked(tmp_path):
    """Checked engines, closed at the end."""
    made = []

    def make(**settings):
        sizes = {"kv_pages": 8, "max_running": 4, "max_batch_tokens": 12}
        sizes["adapter_gpu_bytes"] = ADAPTER_BYTES  # each adapter must be evicted for the next
        made.append(CheckedEngine(tmp_path / f"{len(made)}", **{**sizes, **settings}))
        return made[-1]

    yield make
    for checked in made:
        checked.engine.close()


def fill(checked):
    """Submit seven requests; return their ids."""
    long = SamplingParams(10, temperature=1.0, seed=5, frequency_penalty=1.5)
    cold = SamplingParams(5, temperature=0.0, repetition_penalty=3.0)
    stops = SamplingParams(10, 4, 0.0, stop_token_ids=tuple(range(20)), logit_bias=((7, 2.0),))
    prefix = (7,) * (3 * PAGE)
    return [
        checked.submit((*prefix, 8), sampling=cold),
        checked.submit(prefix, sampling=long, n=2),
        checked.submit((7, 8), sampling=stops, adapter=GOOD),
        checked.submit((*prefix, 9, 9), sampling=long, adapter=GOOD),
        checked.submit((9,), (8,), sampling=cold, adapter=OTHER),
        checked.submit((5, 6), sampling=stops, adapter=BROKEN),
        checked.submit((8,), sampling=long, salt="globex"),
    ]


def run(checked, until=2000):
    """Step until all have ended, `until` steps at most; return the number of steps."""
    for step in range(until):
        if not checked.live:
            return step
        if step % LOAD_EVERY == 0:
            checked.load()
        checked.step()
    return until


@pytest.fixture(
    params=[{"overlap": True}, {"overlap": False}, {"overlap": True, "states": True}],
    ids=["overlapped", "read_at_once", "with_states"],
)
def steps(make_checked, request, monkeypatch):
    """Return the number of steps of the undisturbed requests, and the settings of their engines.

    With states, each state is saved behind any page.
    """
    settings = request.param
    monkeypatch.setattr(KVCache, "state_piece", PAGE)
    monkeypatch.setattr(batch_builder, "CHUNK", PAGE)
    checked = make_checked(**settings)
    fill(checked)
    return run(checked), settings


def test_the_set_of_requests_passes_every_stage(make_checked):
    checked, stages = make_checked(), set()
    fill(checked)
    while checked.live:
        run(checked, until=1)
        scheduler = checked.engine._scheduler
        stages |= {"waits for its adapter" for s in scheduler.waiting if s.adapter and not s.lease}
        stages |= {"waits with its adapter" for s in scheduler.waiting if s.lease}
        stages |= {"preempted" for s in scheduler.waiting if s.output_length}
        stages |= {"in the middle of its prompt" for s in scheduler.running if s.remaining > 1}
        stages |= {"shares" for page in checked.engine._cache._references if page > 1}
        stages |= {"its last token is in flight" for s in scheduler.running if s.complete}
    assert len(stages) == 6, stages


@pytest.mark.parametrize("stride", STRIDES)
def test_an_abort_at_any_step_changes_no_other_request(make_checked, steps, stride):
    count, settings = steps
    for step in range(0, count, stride):
        checked = make_checked(**settings)
        names = fill(checked)
        run(checked, until=step)
        checked.abort(names[step % len(names)])
        checked.abort(names[(step + 1) % len(names)], choice=step // len(names) % 2)
        checked.drain()


@pytest.mark.parametrize("stride", STRIDES)
def test_a_failure_at_any_step_fails_only_the_requests_of_that_step(make_checked, steps, stride):
    count, settings = steps
    for step in range(0, count, stride):
        checked = make_checked(**settings)
        fill(checked)
        run(checked, until=step)
        checked.fault = ("before", "after")[step % 2]
        checked.drain()


@pytest.mark.parametrize("stride", STRIDES)
def test_a_reset_at_any_step_fails_every_request_and_holds_nothing(make_checked, steps, stride):
    count, settings = steps
    for step in range(0, count, stride):
        checked = make_checked(**settings)
        fill(checked)
        run(checked, until=step)
        failed = checked.engine.fail_all(StepFailed("the engine began anew"))
        assert sorted(output.request_id for output in failed) == sorted(checked.live)
        checked.live.clear()
        fill(checked)
        checked.drain()


def test_a_shared_prefix_is_computed_once_for_a_hundred_requests(make_checked):
    checked = make_checked(kv_pages=1200, max_running=64, max_batch_tokens=256)
    prefix = tuple(i % 60 for i in range(1000))
    sampling = SamplingParams(1, temperature=0.0)
    for i in range(100):
        checked.submit((*prefix, i % 60, 7), sampling=sampling, adapter=GOOD, salt="acme")
    checked.drain()
    assert checked.model.tokens == 1000 + 100 * 2


def test_the_prompt_of_128_choices_is_computed_once_but_for_its_last_page(make_checked):
    checked = make_checked(kv_pages=1200, max_running=64, max_batch_tokens=256)
    prompt, sampling = tuple(i % 60 for i in range(1003)), SamplingParams(1, temperature=0.0)
    checked.submit(prompt, sampling=sampling, adapter=GOOD, n=128)
    checked.drain()
    assert checked.model.tokens == 1003 // PAGE * PAGE + 128 * (1003 % PAGE)


@pytest.mark.parametrize("other", [{"salt": "globex"}, {"adapter": OTHER}, {"adapter": None}])
def test_another_tenant_or_adapter_never_hits_a_cached_prefix(make_checked, other):
    checked = make_checked(kv_pages=1200, max_running=64, max_batch_tokens=256)
    prompt, sampling = tuple(i % 60 for i in range(1000)), SamplingParams(1, temperature=0.0)
    for call in ({}, other, {}):
        checked.submit(prompt, sampling=sampling, **{"adapter": GOOD, "salt": "acme", **call})
        for _ in range(40):
            checked.load()
            checked.step()
    checked.drain()
    assert checked.model.tokens == 2 * 1000 + PAGE


def test_a_late_abort_does_not_end_a_later_request_with_the_same_id(make_checked):
    checked = make_checked(overlap=False)
    engine, request = checked.engine, Request("r", ((7,),), SamplingParams(1, temperature=0.0))
    engine.submit(request)
    checked.model.after = lambda: engine.abort("r")  # from another thread, in its last step
    (last,) = engine.step()
    assert last.finish is not None
    checked.model.after = lambda: None
    engine.submit(request)
    assert engine.step() == [last]
