"""The Σ rank that a goal leaves room for, learned from steps of a device whose cost is known."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lorikeet_engine.costs import StepCosts
from lorikeet_engine.execution.warm_up import DummyLease, dummy_chunk
from lorikeet_engine.scheduling import step_counters
from lorikeet_engine.scheduling.step_budget import StepBudget
from lorikeet_engine.scheduling.step_counters import StepCounters, StepLaunch

GOAL_S, BASE_S, SLOPE_S = 10e-3, 6e-3, 2e-6
ROOM = 2000  # (GOAL_S - BASE_S) / SLOPE_S


class Device:
    """Computes one step after the other; only the clock moves."""

    def __init__(self, base_s=BASE_S):
        self.base_s, self.now_s = base_s, 0.0
        self.dice, self.counters = random.Random(7), StepCounters()

    def perf_counter(self):
        return self.now_s

    def run(self, budget, ranks, *, more_s=0.0, prompt=0):
        """A step of three sequences, two of them under one adapter of this rank."""
        step = self.launch(budget, ranks, prompt)
        self.now_s += self.base_s + SLOPE_S * ranks + more_s
        self.read(budget, step)

    def launch(self, budget, ranks, prompt=0):
        return StepLaunch(self.now_s, 3, 1, budget.decode_ranks(chunks(ranks, prompt)))

    def read(self, budget, step):
        """As an engine does."""
        step_s = self.counters.step_read(step)
        if step.decode_ranks is not None:
            budget.record(step_s, step.decode_ranks)

    def noise_s(self):
        """3% either way; every tenth step is ten times as slow."""
        hiccup_s = 10 * self.base_s if self.dice.random() < 0.1 else 0.0
        return self.base_s * self.dice.uniform(-0.03, 0.03) + hiccup_s


def chunks(ranks, prompt=0):
    own = [dummy_chunk(1, 16, DummyLease(slot, rank)) for slot, rank in ((0, ranks), (0, ranks))]
    return [*own, dummy_chunk(1 + prompt, 16, None)]


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(step_counters, "time", SimpleNamespace(perf_counter=device.perf_counter))
    return device


def budget(base_s=BASE_S, slope_s=SLOPE_S):
    return StepBudget(GOAL_S, StepCosts(base_s, sequence_s=0.0, lora_s=0.0, rank_s=slope_s))


def test_before_the_first_step_it_goes_by_what_was_measured_at_start():
    assert budget().max_ranks == pytest.approx(ROOM)


def test_it_finds_the_base_of_the_steps_that_run_through_noise_and_hiccups(device):
    one = budget(base_s=9e-3)
    for ranks in [16, 700, 2400] * 20:
        device.run(one, ranks, more_s=device.noise_s())
    assert one.max_ranks == pytest.approx(ROOM, rel=0.1)


def test_it_follows_a_base_that_changes_within_a_few_steps(device):
    one = budget()
    for _ in range(20):
        device.run(one, 500)
    device.base_s = 8e-3
    for _ in range(8):
        device.run(one, 500)
    assert one.max_ranks == pytest.approx(ROOM / 2)


def test_steps_with_prompts_and_idle_time_teach_it_nothing(device):
    one = budget()
    for _ in range(50):
        device.run(one, 500, prompt=100, more_s=20e-3)
        device.now_s += 1.0
        device.run(one, 500)
    assert one.max_ranks == pytest.approx(ROOM)


def test_a_step_launched_before_the_last_was_read_begins_when_that_was(device):
    one = budget(base_s=1e-3)
    flight = device.launch(one, 500)
    for _ in range(20):
        device.now_s += 1e-4
        following = device.launch(one, 500)
        device.now_s += BASE_S + SLOPE_S * 500 - 1e-4
        device.read(one, flight)
        flight = following
    assert one.max_ranks == pytest.approx(ROOM)


@pytest.mark.parametrize("wrong", [0.6, 2.0, 5.0])
def test_with_a_wrong_slope_steps_come_to_the_goal_all_the_same(device, wrong):
    one, taken_s = budget(slope_s=wrong * SLOPE_S), []
    ranks = 0.0
    for _ in range(60):
        for _ in range(15):
            began_s = device.now_s
            device.run(one, ranks)
            taken_s.append(device.now_s - began_s)
        ranks = one.max_ranks
    assert taken_s[-1] == pytest.approx(GOAL_S, rel=0.01)


def test_a_goal_that_no_step_can_reach_leaves_no_room(device):
    one = budget()
    device.base_s = 12e-3
    for _ in range(20):
        device.run(one, 16)
    assert one.max_ranks <= 0
    assert one.max_prompt_tokens(chunks(16)) == 128


def test_prompts_have_what_the_decodes_beside_them_leave_of_the_goal():
    costs = StepCosts(BASE_S, 0.0, lora_s=0.0, rank_s=SLOPE_S, prompt_token_s=4e-6)
    one = StepBudget(GOAL_S, replace(costs, lora_token_s=1e-6))
    left_s = GOAL_S - BASE_S - SLOPE_S * 500
    assert one.max_prompt_tokens(chunks(500)) == pytest.approx(left_s / 5e-6, abs=1)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ((512, 1024, 2048), 1024),  # the next pass, of 2,048 tokens, takes longer than the goal
        ((512, 1024), 1203),  # what is larger than all of them takes as long as it is
        ((2048,), 1203),
        ((), 1203),
    ],
)
def test_prompts_fill_the_largest_pass_that_fits_the_goal(sizes, tokens):
    costs = StepCosts(0.0, 0.0, lora_s=0.0, rank_s=SLOPE_S, prompt_token_s=GOAL_S / 1200)
    one, decodes = StepBudget(GOAL_S, replace(costs, lora_token_s=0.0), sizes), chunks(0)
    assert len(decodes) == 3
    assert len(decodes) + one.max_prompt_tokens(decodes) == pytest.approx(tokens, abs=1)
