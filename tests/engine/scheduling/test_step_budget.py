"""Σ rank and prompt tokens allowed by a goal, learned from a device whose costs are known."""

import random
from types import SimpleNamespace

import pytest

from lorikeet_engine.costs import RowsTime, StepCosts, seen_tokens
from lorikeet_engine.execution.warm_up import DummyLease, dummy_chunk
from lorikeet_engine.scheduling import step_counters
from lorikeet_engine.scheduling.sequence import Chunk
from lorikeet_engine.scheduling.step_budget import PromptBudget, StepBudget
from lorikeet_engine.scheduling.step_counters import StepCounters, StepLaunch

GOAL_S, BASE_S, SLOPE_S = 10e-3, 6e-3, 2e-6
ROOM = 2000  # (GOAL_S - BASE_S) / SLOPE_S
DEPTHS = (0, 1000, 10_000, 50_000, 90_000)


class Device:
    """Device that computes steps one after the other on a clock of its own."""

    def __init__(self, base_s=BASE_S):
        self.base_s, self.now_s = base_s, 0.0
        self.dice, self.counters = random.Random(7), StepCounters()

    def perf_counter(self):
        return self.now_s

    def run(self, budget, ranks, *, more_s=0.0, prompt=0):
        """Run a step of three sequences, two of them under one adapter of this rank."""
        step = self.launch(budget, ranks, prompt)
        self.now_s += self.base_s + SLOPE_S * ranks + more_s
        self.read(budget, step)

    def launch(self, budget, ranks, prompt=0):
        return StepLaunch(self.now_s, 3, 1, budget.expected(chunks(ranks, prompt)))

    def read(self, budget, step):
        """Wait for the step and record its time, as an engine does."""
        step_s = self.counters.step_read(step)
        if step.expected is not None:
            budget.record(step_s, step.expected)

    def noise_s(self):
        """Return noise of 3% either way; every tenth step takes ten times as long."""
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


def costs(base_s=BASE_S, slope_s=SLOPE_S, token_s=0.0, **more):
    """Costs of base_s whatever the tokens, plus token_s for each token."""
    rows = (RowsTime(0, base_s), RowsTime(2048, base_s + 2048 * token_s))
    usual = ("seen_token_s", "prompt_seen_s", "pieces_s", "split_s", "lora_s", "lora_token_s")
    return StepCosts(rows, rank_s=slope_s, **{**dict.fromkeys(usual, 0.0), **more})


def budget(base_s=BASE_S, slope_s=SLOPE_S, **more):
    return StepBudget(GOAL_S, costs(base_s, slope_s, **more))


def prompt_at(depth):
    """Return a prompt of 100,000 tokens, of which `depth` have been computed."""
    sequence = dummy_chunk(100_000, 16, None).sequence
    sequence.kv.computed = depth
    return sequence


def test_the_first_base_comes_from_the_costs_measured_at_start():
    assert budget().max_ranks(0) == pytest.approx(ROOM)


def test_the_base_is_learned_through_noise_and_hiccups(device):
    one = budget(base_s=9e-3)
    for ranks in [16, 700, 2400] * 20:
        device.run(one, ranks, more_s=device.noise_s())
    assert one.max_ranks(0) == pytest.approx(ROOM, rel=0.1)


def test_a_changed_base_is_learned_within_a_few_steps(device):
    one = budget()
    for _ in range(20):
        device.run(one, 500)
    device.base_s = 8e-3
    for _ in range(8):
        device.run(one, 500)
    assert one.max_ranks(0) == pytest.approx(ROOM / 2)


def test_steps_with_prompts_and_idle_time_do_not_change_the_base(device):
    one = budget()
    for _ in range(50):
        device.run(one, 500, prompt=100, more_s=20e-3)
        device.now_s += 1.0
        device.run(one, 500)
    assert one.max_ranks(0) == pytest.approx(ROOM)


def test_a_step_launched_early_is_timed_from_the_reading_of_the_step_before(device):
    one = budget(base_s=1e-3)
    flight = device.launch(one, 500)
    for _ in range(20):
        device.now_s += 1e-4
        following = device.launch(one, 500)
        device.now_s += BASE_S + SLOPE_S * 500 - 1e-4
        device.read(one, flight)
        flight = following
    assert one.max_ranks(0) == pytest.approx(ROOM)


@pytest.mark.parametrize("wrong", [0.6, 2.0, 5.0])
def test_steps_reach_the_goal_even_with_a_wrong_slope(device, wrong):
    one, taken_s = budget(slope_s=wrong * SLOPE_S), []
    ranks = 0.0
    for _ in range(60):
        for _ in range(15):
            began_s = device.now_s
            device.run(one, ranks)
            taken_s.append(device.now_s - began_s)
        ranks = one.max_ranks(0)
    assert taken_s[-1] == pytest.approx(GOAL_S, rel=0.01)


def test_a_goal_that_no_step_can_reach_allows_no_rank(device):
    one = budget()
    device.base_s = 12e-3
    for _ in range(20):
        device.run(one, 16)
    assert one.max_ranks(0) <= 0
    assert one.prompt_budget(chunks(16), 2000).take(prompt_at(0)).length == 128


def test_forced_tokens_of_decodes_take_their_time_from_prompts():
    one = budget(base_s=GOAL_S / 2, token_s=1e-6)
    alone, beside = (one.prompt_budget(chunks(0, forced), 9000) for forced in (0, 200))
    room = alone.tokens_within(0, 9000)
    assert 1000 < room < 9000
    assert beside.tokens_within(0, 9000) == pytest.approx(room - 200, abs=1)


def test_a_step_of_forced_tokens_counts_as_a_step_of_decodes():
    one, forced = budget(token_s=1e-6), dummy_chunk(21, 16, None)
    forced.sequence.decode_tokens = 21
    step = one.expected([*chunks(0), forced])
    assert not step.has_prompts
    assert step.seconds == pytest.approx(one.expected(chunks(0)).seconds + 20e-6)


def test_the_cost_of_context_is_not_learned_as_base(device):
    one = budget(seen_token_s=1e-8)
    assert one.max_ranks(100_000) == pytest.approx(ROOM - 500)
    device.base_s += 3 * 1e-8  # each of the three sequences sees at least itself
    for _ in range(20):
        device.run(one, 500)
    assert one.max_ranks(100_000) == pytest.approx(ROOM - 500)


def test_decodes_attend_to_at_most_the_window_in_layers_with_a_window():
    one = budget(seen_token_s=1e-6, window=100, windowed=0.75)
    long, short = (dummy_chunk(length, 16, None).sequence for length in (500, 80))
    for sequence in (long, short):
        sequence.kv.computed = sequence.length - 1
    expected = one.expected([Chunk.of(long, 1), Chunk.of(short, 1)])
    assert expected.seconds == pytest.approx((200 + 80) * 1e-6)


def test_prompts_get_the_time_that_decodes_leave_of_the_goal():
    one = budget(token_s=4e-6, lora_token_s=1e-6)
    room = one.prompt_budget(chunks(500), 2000)
    left_s = GOAL_S - BASE_S - 256 * 4e-6 - SLOPE_S * 500
    assert room.take(prompt_at(0)).length == pytest.approx(left_s / 5e-6, abs=1)
    assert not room


@pytest.mark.parametrize("sizes", [(), (16, 64, 256, 1024)])
@pytest.mark.parametrize("depth", [0, 1000, 10_000, 90_000])
def test_a_chunk_is_the_longest_that_the_goal_allows_at_its_depth(depth, sizes):
    one = StepBudget(GOAL_S, costs(token_s=1e-6, prompt_seen_s=2e-10), sizes)
    left_s = GOAL_S - BASE_S - 256e-6

    def takes_s(tokens):
        padded = next((size for size in sizes if size >= 3 + tokens), 3 + tokens)
        return (padded - 3) * 1e-6 + 2e-10 * seen_tokens(tokens, depth)

    length = one.prompt_budget(chunks(0), 2000).take(prompt_at(depth)).length
    fits = [tokens for tokens in range(1, 2001) if takes_s(tokens) <= left_s]
    assert length == max(128, *fits)


@pytest.mark.parametrize(
    ("decodes", "depth", "length"), [(3, 0, 500), (3, 90_000, 200), (0, 90_000, 500)]
)
def test_split_attention_of_decodes_and_prompts_costs_split_s(decodes, depth, length):
    one = budget(token_s=1e-6, split_s=300e-6)
    room = PromptBudget(2000, one, decodes, left_s=500.5e-6)
    assert room.take(prompt_at(depth)).length == length


def test_deeper_chunks_are_shorter_and_the_rest_goes_to_the_next_prompt():
    one = budget(token_s=1e-6, prompt_seen_s=2e-10)
    lengths = [one.prompt_budget(chunks(0), 2000).take(prompt_at(at)).length for at in DEPTHS]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 5 * lengths[-1]
    short, room = dummy_chunk(200, 16, None).sequence, one.prompt_budget(chunks(0), 2000)
    taken = [room.take(sequence).length for sequence in (short, prompt_at(50_000))]
    assert taken[0] == 200
    assert 100 < taken[1] < one.prompt_budget(chunks(0), 2000).take(prompt_at(50_000)).length
    assert not room


def test_a_rest_of_the_goal_gives_no_sliver_deep_in_a_prompt():
    """Leave the rest to a shallow prompt, or to a deep one whose last tokens fit."""
    one = budget(token_s=1e-6, prompt_seen_s=2e-10)
    room = PromptBudget(2000, one, decodes=3, left_s=250e-6)
    assert room.take(dummy_chunk(128, 16, None).sequence).length == 128
    assert room
    assert room.fits(prompt_at(0))
    assert not room.fits(prompt_at(90_000))
    assert room.fits(prompt_at(99_997))
    assert room.take(prompt_at(99_997)).length == 3


def test_time_of_prompts_beyond_the_measured_costs_is_learned():
    one = budget(token_s=1e-6)
    before = one.prompt_budget(chunks(0), 5000).take(prompt_at(0)).length
    step = chunks(0, prompt=1000)
    for _ in range(20):
        expected = one.expected(step)
        one.record(expected.seconds + 1e-3, expected)
    assert one.prompt_budget(chunks(0), 5000).take(prompt_at(0)).length == before - 1000


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ((512, 1024, 2048), 1024),  # the next pass, of 2,048 tokens, takes longer than the goal
        ((512, 1024), 1200),  # a step larger than all sizes takes the time of its own tokens
        ((2048,), 128 + 3),
        ((), 1200),
    ],
)
def test_prompts_fill_the_largest_pass_that_fits_the_goal(sizes, tokens):
    token_s = GOAL_S / 1200
    one, decodes = StepBudget(GOAL_S, costs(0.0, token_s=token_s, max_running=3), sizes), chunks(0)
    room = one.prompt_budget(decodes, 2000)
    assert len(decodes) == 3
    assert 3 + room.take(prompt_at(0)).length == pytest.approx(tokens, abs=1)
    assert not room


def test_without_a_goal_only_the_number_of_tokens_is_limited():
    room = PromptBudget(500)
    assert room.take(prompt_at(99_900)).length == 100
    assert room.take(prompt_at(0)).length == 400
    assert not room
