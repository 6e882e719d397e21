"""Sequences in the background get what all others leave, and end with the same tokens."""

import random
from types import SimpleNamespace

import pytest

from lorikeet_engine.costs import RowsTime, StepCosts
from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.scheduling import scheduler
from lorikeet_engine.scheduling.step_budget import StepBudget
from tests.engine.scheduler_harness import COSTS, SchedulerHarness

BACKGROUND = SchedulingParams("acme", weight=100.0, priority=9, background=True)
FOREGROUND = SchedulingParams("acme", weight=0.01, priority=-9)


def test_the_foreground_begins_before_older_sequences_in_the_background():
    harness = SchedulerHarness(tokens=8, sequences=8)
    late = [harness.add(8, scheduling=BACKGROUND) for _ in range(3)]
    first = [
        harness.add(8, scheduling=FOREGROUND),
        harness.add(8, scheduling=SchedulingParams("globex")),
    ]
    begun = []
    for _ in range(60):
        begun += [s for s, _ in harness.step() if s not in begun]
    assert begun == [*first, *late]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_background_gives_its_slots_to_the_foreground_at_once(overlap):
    harness = SchedulerHarness(sequences=4, overlap=overlap)
    running = [harness.add(3, max_tokens=50, scheduling=BACKGROUND) for _ in range(4)]
    harness.step()
    harness.step()
    comers = [harness.add(3, max_tokens=9, scheduling=FOREGROUND) for _ in range(4)]
    harness.step()
    assert {s for s, _ in harness.step()} >= set(comers)
    harness.run()
    assert set(harness.finished) == {*running, *comers}
    assert sum(s.timings.preemptions for s in comers) == 0


def test_the_background_gives_its_pages_to_the_foreground():
    harness = SchedulerHarness(pages=10, sequences=8)
    large = harness.add(32, max_tokens=4, scheduling=BACKGROUND)
    harness.step()
    comer = harness.add(24, max_tokens=4, scheduling=FOREGROUND)
    begun = [[s for s, _ in harness.step()] for _ in range(3)]
    assert comer in begun[-1]
    assert large.timings.preemptions == 1
    harness.run()
    assert set(harness.finished) == {large, comer}


def test_the_foreground_never_gives_way_to_the_background():
    harness = SchedulerHarness(sequences=3, pages=20)
    running = [harness.add(3, max_tokens=30, scheduling=FOREGROUND) for _ in range(2)]
    for _ in range(20):
        harness.step()
        harness.add(3, scheduling=BACKGROUND)
    harness.run()
    assert [s.timings.preemptions for s in running] == [0, 0]


def test_beside_the_foreground_steps_become_a_few_percent_longer():
    harness = SchedulerHarness(tokens=512, sequences=256, pages=4000)
    streams = [harness.add(3, max_tokens=60, scheduling=FOREGROUND) for _ in range(32)]
    harness.step()
    for _ in range(200):
        harness.add(40, max_tokens=20, scheduling=BACKGROUND)
    beside = []
    for _ in range(40):
        chunks = harness.step()
        assert {s for s, _ in chunks} >= set(streams)
        beside.append(sum(length for _, length in chunks) - 32)
    allowed = COSTS.rows_s(32) * 1.03
    assert all(COSTS.rows_s(32 + tokens) <= allowed for tokens in beside)
    assert sum(beside) > 0.8 * len(beside) * StepBudget(None, COSTS).background_tokens(32)
    harness.run()
    assert len(harness.finished) == 232


def test_without_a_foreground_the_background_fills_steps():
    harness = SchedulerHarness(tokens=64, sequences=16)
    for _ in range(16):
        harness.add(30, scheduling=BACKGROUND)
    assert sum(length for _, length in harness.step()) == 64


def test_alone_the_background_computes_steps_that_a_comer_can_wait_for():
    rows = (RowsTime(1, 0.007), RowsTime(32, 0.05), RowsTime(256, 0.5))  # two CPU cores'
    slow = StepBudget(None, StepCosts(rows=rows))
    assert slow.background_tokens_alone() == 34  # 0.056 s: 8 steps of one token
    assert StepBudget(None, COSTS).background_tokens_alone() == COSTS.step_tokens, "an H200's"
    harness = SchedulerHarness(tokens=512, sequences=256, pages=4000)
    made = [harness.add(3, max_tokens=20, scheduling=BACKGROUND) for _ in range(100)]
    harness.budget = slow
    assert {sum(length for _, length in harness.step()) for _ in range(15)} == {34}
    harness.run()
    assert set(harness.finished) == set(made)


def test_alone_the_background_computes_more_forced_tokens_than_fit_into_its_time():
    harness = SchedulerHarness()
    harness.budget = StepBudget(None, StepCosts(rows=(RowsTime(1, 0.01), RowsTime(64, 0.64))))
    assert harness.budget.background_tokens_alone() == 8
    made = [harness.add(3, max_tokens=40, scheduling=BACKGROUND) for _ in range(3)]
    harness.step()
    harness.forced = {made[1]: tuple(range(20))}
    harness.run()
    assert set(harness.finished) == set(made)


def test_work_in_the_background_costs_its_tenant_no_turn_in_the_foreground():
    harness = SchedulerHarness(tokens=8, sequences=8)
    harness.add(64, scheduling=BACKGROUND)
    for _ in range(6):
        harness.step()
    own = harness.add(8, scheduling=SchedulingParams("acme"))
    other = harness.add(8, scheduling=SchedulingParams("globex"))
    begun = [s for _ in range(8) for s, _ in harness.step() if s in (own, other)]
    assert begun[0] is own


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlap", [False, True])
def test_pauses_change_no_tokens(seed, overlap):
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(99) for _ in range(numbers.randrange(3, 30))] for _ in range(24)]
    adapters = [numbers.choice([None, "a", "b"]) for _ in prompts]

    def run(kinds, **limits):
        harness, added = SchedulerHarness(overlap=overlap, **limits), []
        for prompt, adapter, kind in zip(prompts, adapters, kinds, strict=True):
            added.append(harness.add(prompt, adapter, max_tokens=12, scheduling=kind))
            for _ in range(numbers.randrange(3)):
                harness.step()
        harness.run()
        return [harness.finished[s] for s in added]

    alone = run([FOREGROUND] * 24)
    mixed = [numbers.choice([FOREGROUND, BACKGROUND]) for _ in prompts]
    assert run(mixed, sequences=5, tokens=24, pages=20) == alone


@pytest.mark.parametrize("background", [0, 20])
def test_waiting_in_the_background_does_not_slow_the_estimate_of_waits(monkeypatch, background):
    now_s = 0.0
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now_s))
    harness = SchedulerHarness(tokens=32, sequences=8)
    harness.add(3, max_tokens=60, scheduling=FOREGROUND)
    for _ in range(background):
        harness.add(40, max_tokens=20, scheduling=BACKGROUND)
    per_s = harness.scheduler._throughput.cost_per_s
    for _ in range(40):
        now_s += 1.0
        harness.step()
    assert harness.scheduler._throughput.cost_per_s == per_s  # no step was full
    assert harness.scheduler.wait_s(FOREGROUND) == 0.0


def test_the_foreground_waits_for_no_prefix_that_the_background_computes():
    harness = SchedulerHarness(tokens=64, sequences=8, pages=200)
    prefix = list(range(200))
    late = harness.add(prefix, scheduling=BACKGROUND)
    harness.step()
    first = harness.add([*prefix, 5], scheduling=FOREGROUND)
    begun = [first in {s for s, _ in harness.step()} for _ in range(2)]
    assert any(begun)
    harness.run()
    assert set(harness.finished) == {late, first}


@pytest.mark.parametrize(
    "limit", [{"adapters": 2}, {"ranks": 20}, {"places": 2}], ids=["adapters", "ranks", "memory"]
)
def test_the_background_gives_the_place_of_its_adapters_to_the_foreground(limit):
    harness = SchedulerHarness(sequences=8, pages=200, **limit)
    late = [harness.add(3, name, max_tokens=90, scheduling=BACKGROUND) for name in "ab"]
    harness.step()
    harness.step()
    first = harness.add(3, "c", max_tokens=9, scheduling=FOREGROUND)
    begun = [first in {s for s, _ in harness.step()} for _ in range(5)]
    assert any(begun)
    assert sum(s.timings.preemptions for s in late) <= 2
    harness.run()
    assert set(harness.finished) == {*late, first}


def test_a_sequence_that_waits_in_the_background_keeps_no_adapter_from_the_foreground():
    harness = SchedulerHarness(pages=20, sequences=8, places=1)
    harness.add(60, max_tokens=12, scheduling=FOREGROUND)
    late = harness.add(20, "a", scheduling=BACKGROUND)
    for _ in range(2):
        harness.step()
    assert late.lease is not None
    assert not late.kv.pages
    first = harness.add(3, "b", scheduling=FOREGROUND)
    assert any(first in {s for s, _ in harness.step()} for _ in range(5))
    harness.run()
