"""Aborts and failures at every step of one crowd's life, and what its prefixes save.

The crowd passes through everything that can be waited for: an adapter, KV pages, another's
prefix, a place in a batch, the tokens of a step in flight.
"""

import pytest

from lorikeet_engine.errors import StepFailed
from lorikeet_engine.request import Request, SamplingParams
from tests.engine.crowd import ADAPTER_BYTES, BROKEN, GOOD, OTHER, Crowd
from tests.engine.hash_model import PAGE

pytestmark = pytest.mark.usefixtures("one_thread")

LOAD_EVERY = 3  # steps between two pieces of loading


@pytest.fixture
def crowds(tmp_path):
    """Crowds of one kind, each in an engine of its own."""
    made = []

    def make(**settings):
        sizes = {"kv_pages": 8, "max_running": 4, "max_batch_tokens": 12}
        sizes["adapter_gpu_bytes"] = ADAPTER_BYTES  # one must make room for the next
        made.append(Crowd(tmp_path / f"{len(made)}", **{**sizes, **settings}))
        return made[-1]

    yield make
    for crowd in made:
        crowd.engine.close()


def fill(crowd):
    """Seven requests; returns their ids."""
    long, cold = SamplingParams(10, temperature=1.0, seed=5), SamplingParams(5, temperature=0.0)
    stops = SamplingParams(10, 4, 0.0, stop_token_ids=tuple(range(20)))
    prefix = (7,) * (3 * PAGE)
    return [
        crowd.submit((*prefix, 8), sampling=cold),
        crowd.submit(prefix, sampling=long, n=2),
        crowd.submit((7, 8), sampling=stops, adapter=GOOD),
        crowd.submit((*prefix, 9, 9), sampling=long, adapter=GOOD),
        crowd.submit((9,), (8,), sampling=cold, adapter=OTHER),
        crowd.submit((5, 6), sampling=stops, adapter=BROKEN),
        crowd.submit((8,), sampling=long, salt="globex"),
    ]


def run(crowd, until=2000):
    """Step until all have ended, `until` steps at most; returns how many there were."""
    for step in range(until):
        if not crowd.live:
            return step
        if step % LOAD_EVERY == 0:
            crowd.load()
        crowd.step()
    return until


@pytest.fixture(params=[True, False], ids=["overlapped", "read_at_once"])
def steps(crowds, request):
    """How many steps the crowd lives when nothing happens to it, and in which engines."""
    settings = {"overlap": request.param}
    crowd = crowds(**settings)
    fill(crowd)
    return run(crowd), settings


def test_the_crowd_passes_every_stage(crowds):
    crowd, stages = crowds(), set()
    fill(crowd)
    while crowd.live:
        run(crowd, until=1)
        scheduler = crowd.engine._scheduler
        stages |= {"waits for its adapter" for s in scheduler.waiting if s.adapter and not s.lease}
        stages |= {"waits with its adapter" for s in scheduler.waiting if s.lease}
        stages |= {"preempted" for s in scheduler.waiting if s.output_length}
        stages |= {"in the middle of its prompt" for s in scheduler.running if s.remaining > 1}
        stages |= {"shares" for page in crowd.engine._cache._references if page > 1}
        stages |= {"its last token is in flight" for s in scheduler.running if s.complete}
    assert len(stages) == 6, stages


def test_an_abort_at_any_step_leaves_the_others_as_they_are(crowds, steps):
    count, settings = steps
    for step in range(count):
        crowd = crowds(**settings)
        names = fill(crowd)
        run(crowd, until=step)
        crowd.abort(names[step % len(names)])
        crowd.abort(names[(step + 1) % len(names)], choice=step // len(names) % 2)
        crowd.drain()


def test_a_failure_at_any_step_fails_that_step_alone(crowds, steps):
    count, settings = steps
    for step in range(count):
        crowd = crowds(**settings)
        fill(crowd)
        run(crowd, until=step)
        crowd.fault = ("before", "after")[step % 2]
        crowd.drain()


def test_beginning_anew_at_any_step_fails_everyone_and_holds_nothing(crowds, steps):
    count, settings = steps
    for step in range(0, count, 3):
        crowd = crowds(**settings)
        fill(crowd)
        run(crowd, until=step)
        failed = crowd.engine.fail_all(StepFailed("the engine began anew"))
        assert sorted(output.request_id for output in failed) == sorted(crowd.live)
        crowd.live.clear()
        fill(crowd)
        crowd.drain()


def test_a_shared_prefix_is_computed_once_for_a_hundred_requests(crowds):
    crowd = crowds(kv_pages=1200, max_running=64, max_batch_tokens=256)
    prefix = tuple(i % 60 for i in range(1000))
    sampling = SamplingParams(1, temperature=0.0)
    for i in range(100):
        crowd.submit((*prefix, i % 60, 7), sampling=sampling, adapter=GOOD, salt="acme")
    crowd.drain()
    assert crowd.model.tokens == 1000 + 100 * 2


@pytest.mark.parametrize("other", [{"salt": "globex"}, {"adapter": OTHER}, {"adapter": None}])
def test_another_tenant_or_adapter_never_hits_it(crowds, other):
    crowd = crowds(kv_pages=1200, max_running=64, max_batch_tokens=256)
    prompt, sampling = tuple(i % 60 for i in range(1000)), SamplingParams(1, temperature=0.0)
    for call in ({}, other, {}):
        crowd.submit(prompt, sampling=sampling, **{"adapter": GOOD, "salt": "acme", **call})
        for _ in range(40):
            crowd.load()
            crowd.step()
    crowd.drain()
    assert crowd.model.tokens == 2 * 1000 + PAGE


def test_an_abort_that_comes_too_late_does_not_end_the_next_request_of_that_id(crowds):
    crowd = crowds(overlap=False)
    engine, request = crowd.engine, Request("r", ((7,),), SamplingParams(1, temperature=0.0))
    engine.submit(request)
    crowd.model.after = lambda: engine.abort("r")  # from another thread, while its last step runs
    (last,) = engine.step()
    assert last.finish is not None
    crowd.model.after = lambda: None
    engine.submit(request)
    assert engine.step() == [last]
