"""Order of one tenant's prompts, in predicted time of steps: what waits, and for how long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.costs import StepCosts, seen_tokens
from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.scheduling.fairness import prompt_cost
from lorikeet_engine.scheduling.own_order import Turn
from tests.engine import scheduler_harness
from tests.engine.scheduler_harness import SchedulerHarness

COSTS = StepCosts()
STEP = COSTS.step_tokens


class PromptWork:
    """Scheduler of one engine with H200's costs; counts the predicted cost of prompts.

    done: cost of all prompt work so far.
    costs: cost of each step.
    most_of_step: largest cost of a step so far.
    steps_s: predicted time of each step.
    ended: sequence → `done` when its prompt was computed.
    """

    def __init__(self, monkeypatch, **limits):
        monkeypatch.setattr(scheduler_harness, "COSTS", COSTS)
        self.harness = SchedulerHarness(
            **{"tokens": STEP, "sequences": 64, "pages": 100_000, **limits}
        )
        self.done, self.most_of_step, self.ended, self.began = 0.0, 0.0, {}, {}
        self.costs, self.steps_s = [], []

    def add(self, tokens, **request):
        sequence = self.harness.add(tokens, **{"max_tokens": 1, **request})
        self.began[sequence] = self.done
        return sequence

    def step(self):
        before, chunks, seen = self.done, self.harness.step(), 0
        for sequence, length in chunks:
            at = self.harness.reached[sequence]
            self.done += prompt_cost(COSTS, at - length, at)
            seen += seen_tokens(length, at - length)
            if at == sequence.prompt_length:
                self.ended[sequence] = self.done
        self.costs.append(self.done - before)
        self.most_of_step = max(self.most_of_step, self.costs[-1])
        self.steps_s.append(COSTS.step_s(sum(length for _, length in chunks), 0, seen=seen))

    def until(self, *sequences):
        while not self.ended.keys() >= set(sequences):
            self.step()

    def waited(self, sequence):
        """Return the cost of the prompt work from the arrival until the prompt was computed."""
        return self.ended[sequence] - self.began[sequence]


def own(sequence_or_tokens):
    tokens = getattr(sequence_or_tokens, "prompt_length", sequence_or_tokens)
    return prompt_cost(COSTS, 0, tokens)


@pytest.fixture
def make(monkeypatch):
    return lambda **limits: PromptWork(monkeypatch, **limits)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("short", [1, 30, 1500, 2048, 3000, 9000])
@pytest.mark.parametrize("after", [0, 1, 20])
def test_a_short_prompt_waits_for_its_own_work_twice_and_one_step(make, short, after, overlap):
    work = make(overlap=overlap)
    longs = [work.add(tokens) for tokens in (60_000, 30_000, 45_000)]
    for _ in range(after):
        work.step()
    asked = work.add(short)
    work.until(asked)
    assert work.waited(asked) <= 2 * own(short) + work.most_of_step
    assert not work.ended.keys() & set(longs)
    work.until(*longs)
    assert min(work.costs[:-2]) > 0.8 * own(STEP), "each step is full"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_bounds_hold_for_random_prompts_that_arrive_at_any_time(data):
    """The work of shorter prompts and of older ones is known only after all have arrived."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        work, prompts = PromptWork(monkeypatch), []
        lengths = st.sampled_from([10, 200, 1000, 2500, 5000, 17_000, 40_000])
        for _ in range(data.draw(st.integers(2, 14))):
            prompts.append(work.add(data.draw(lengths) + data.draw(st.integers(0, 9))))
            for _ in range(data.draw(st.integers(0, 5))):
                work.step()
        work.until(*prompts)
        step = work.most_of_step
        for sequence in prompts:
            shorter = sum(own(s) for s in prompts if s.prompt_length <= sequence.prompt_length)
            # Work left of longer prompts may be less: then they count as the shorter ones.
            nearly_done = sum(
                min(own(s), own(sequence))
                for s in prompts
                if s.prompt_length > sequence.prompt_length
            )
            assert work.waited(sequence) <= 2 * (shorter + nearly_done) + step
            older = sum(own(s) for s in prompts if s.arrival <= sequence.arrival)
            assert work.waited(sequence) <= 2 * older + 2 * step


def test_a_long_prompt_under_endless_short_ones_ends_within_twice_its_time_alone(make):
    work = make()
    long = work.add(60_000)
    while long not in work.ended:
        while len(work.harness.scheduler.waiting) < 8:
            work.add(700)
        work.step()
    assert 1.5 * own(long) < work.waited(long) <= 2 * own(long) + 2 * work.most_of_step
    assert min(work.costs) > 0.8 * own(STEP), "each step is full"


def test_long_prompts_beside_short_ones_keep_the_throughput_of_the_order_of_arrival(
    make, monkeypatch
):
    def longs_per_s():
        """Return long prompts per predicted second, one short prompt in four steps beside them."""
        work = make()
        longs = [work.add(20_000) for _ in range(8)]
        while not work.ended.keys() >= set(longs):
            if len(work.costs) % 4 == 1:
                work.add(40)
            work.step()
        return len(longs) / sum(work.steps_s)

    now = longs_per_s()
    monkeypatch.setattr(Turn, "computed", lambda *_: None)  # no prompt may overtake
    assert now >= 0.97 * longs_per_s()


@pytest.mark.parametrize("short", [1, 20, 1500])
def test_a_short_prompt_waits_no_longer_deep_in_long_prompts_than_at_their_start(make, short):
    """It comes when a step has begun and the next is launched already."""
    work, waited_s = make(overlap=True), []
    longs = [work.add(100_000) for _ in range(3)]
    while not work.ended.keys() & set(longs):
        for _ in range(20):
            work.step()
        before = len(work.steps_s) - 2
        work.until(work.add(short))
        waited_s.append(sum(work.steps_s[before:]))
    assert len(waited_s) > 5
    assert max(waited_s) <= 3.2 * COSTS.step_s(STEP, 0, seen=seen_tokens(STEP)) < 0.15


@pytest.mark.parametrize(
    ("tokens", "share"), [(2048, 1.0), (8192, 0.995), (32_000, 0.98), (100_000, 0.97)]
)
def test_shorter_chunks_deep_in_prompts_keep_the_throughput_of_full_ones(make, tokens, share):
    work = make()
    work.until(*[work.add(tokens) for _ in range(3)])
    whole, rest = divmod(3 * tokens, STEP)
    full_s = whole * COSTS.step_s(STEP, 0) + (COSTS.step_s(rest, 0) if rest else 0.0)
    full_s += (whole + 1) * COSTS.pieces_s + 3 * COSTS.prompt_seen_s * seen_tokens(tokens)
    assert sum(work.steps_s) <= full_s / share


def test_a_prompt_found_in_the_cache_counts_as_short(make):
    work = make()
    document = [7] * 20_000
    work.until(work.add(document))
    long = work.add(15_000)
    work.step()
    turn = work.add([*document, *range(50)])
    work.step()
    assert turn in work.ended
    assert long not in work.ended


def test_a_short_prompt_overtakes_no_prompt_of_a_higher_priority(make):
    work = make()
    high = work.add(10_000, scheduling=SchedulingParams("", priority=1))
    work.step()
    low = work.add(10, scheduling=SchedulingParams("", priority=0))
    work.until(low)
    assert list(work.ended) == [high, low]


def test_a_prompt_of_a_higher_priority_overtakes_a_longer_one_of_a_lower(make):
    work = make()
    low = work.add(10_000)
    work.step()
    high = work.add(30_000, scheduling=SchedulingParams(priority=1))
    work.until(low, high)
    assert work.waited(low) <= 2 * own(low) + 2 * work.most_of_step


def test_a_short_prompt_does_not_wait_for_a_longer_one_without_its_adapter(make):
    work = make()
    work.harness.tiers.remote = {"slow"}
    work.add(9000, adapter="slow")
    later = work.add(3000)
    work.until(later)
    assert work.waited(later) == pytest.approx(own(later))


@pytest.mark.parametrize(
    ("tokens", "cache"),
    [
        (90, {"pages": 30}),
        (150, {"pages": 22, "window": 40}),
        (150, {"pages": 22, "window": 40, "overlap": True}),
    ],
)
def test_short_prompts_beside_a_half_computed_one_do_not_deadlock_on_pages(tokens, cache):
    harness = SchedulerHarness(tokens=16, **cache)
    made = [harness.add(tokens, max_tokens=12)]
    for shorter in (60, 5, 33, 90, 8, 20):
        harness.step()
        made.append(harness.add(shorter, max_tokens=12))
    harness.run()
    assert set(harness.finished) == set(made)
