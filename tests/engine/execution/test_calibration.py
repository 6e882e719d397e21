"""Measured costs of steps, compared with the costs of simulated and real devices."""

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lorikeet_engine.costs import RowsTime, StepCosts
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.execution import step_timer
from lorikeet_engine.execution.calibration import measure_step_costs
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.gpu.arena import DeviceArena
from tests.engine.engine_driver import Answers, greedy, prompt
from tests.engine.hash_model import SHAPE

DEMO = Path(__file__).parents[3] / "demo/model"
TRUE = StepCosts(
    rows=(
        RowsTime(1, 3.6e-3),
        RowsTime(2, 4e-3),
        RowsTime(32, 4.2e-3),
        RowsTime(64, 5.5e-3),
        RowsTime(512, 12e-3),
        RowsTime(2048, 46e-3),
    ),
    seen_token_s=40e-9,
    prompt_seen_s=1.5e-9,
    pieces_s=1.1e-3,
    split_s=1.7e-3,
    lora_s=0.3e-3,
    rank_s=1.3e-6,
    lora_token_s=1.2e-6,
    head_s=0.2e-3,
    step_tokens=2048,
    max_running=64,
)
SETTINGS = EngineSettings(Path(), Path(), max_batch_tokens=2048, max_running=64, max_rank=64)


class ExactRunner:
    """Runner whose steps take the time that `costs` give, on its own clock.

    noise: largest delay of a step.
    """

    prompt_sizes, state_slots = (128, 2048), 0

    def __init__(self, weights, costs=TRUE, noise=0.0, max_context=131_072):
        windowed = round(12 * costs.windowed)
        windows = (costs.window,) * windowed + (None,) * (12 - windowed)
        groups = SimpleNamespace(windows=(None,))  # of the runner's pages, which do not matter here
        config = SimpleNamespace(
            max_context=max_context,
            vocab_size=1000,
            kv_groups=groups,
            windows=windows,
            mtp=costs.head_s or None,
        )
        self.model = SimpleNamespace(device=torch.device("cpu"), config=config)
        self.weights, self.costs, self.noise = weights, costs, noise
        self.now_s, self.dice = 0.0, random.Random(3)

    def share(self, _step):
        pass

    def forward(self, batch):
        slots = [] if batch.segments is None else batch.segments.slots.tolist()
        ranks = sum(int(self.weights.table[slot, :, :, 2].max()) for slot in slots)
        lengths, ends = np.diff(batch.query_starts), batch.kv_lengths
        prompts = lengths > 1
        tokens = int(lengths[prompts].sum())
        seen = lengths * (ends - lengths) + lengths**2 // 2
        took_s = self.costs.step_s(
            len(batch.token_ids),
            0 if tokens else ranks,
            sum(map(self.costs.decode_sees, ends[~prompts].tolist())),
            adapted=tokens if ranks else 0,
            seen=int(seen[prompts].sum()),
        )
        self.now_s += took_s * (1.0 + self.dice.uniform(0.0, self.noise))

    def predict(self, _batch, _following, *, predicts):
        self.now_s += self.costs.head_s if predicts else 0.0


@pytest.fixture
def measure(monkeypatch):
    """Return a function that measures the costs of a runner; elements: of the arena."""
    measured_s = []

    def measure(
        *, elements=1 << 20, noise=0.0, shape=SHAPE, costs=TRUE, context=131_072, **changes
    ):
        table = torch.zeros(128, shape.layers, 7, 3, dtype=torch.int64)
        weights = LoraWeights(torch.zeros(elements), table)
        runner = ExactRunner(weights, costs, noise, context)
        clock = SimpleNamespace(perf_counter=lambda: runner.now_s)
        monkeypatch.setattr(step_timer, "time", clock)
        arena = DeviceArena(weights, torch.device("cpu"))
        settings = replace(SETTINGS, **changes)
        found = measure_step_costs(runner, 20_000, arena, elements, shape, settings)
        assert not table.any()
        measured_s.append(runner.now_s)
        return found

    measure.took_s = measured_s
    return measure


def assert_close(found, expected):
    assert found.window == expected.window
    for name in StepCosts.__dataclass_fields__.keys() - {"rows", "window"}:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert [tokens for tokens, _ in found.rows] == [tokens for tokens, _ in expected.rows]
    for (_, found_s), (_, expected_s) in zip(found.rows, expected.rows, strict=True):
        assert found_s == pytest.approx(expected_s)


@pytest.mark.parametrize("elements", [1 << 20, 20_000])
@pytest.mark.parametrize("context", [131_072, 8192, 2048])
def test_exact_times_yield_the_coefficients_that_they_were_made_from(measure, elements, context):
    expected = TRUE if context > 2048 else replace(TRUE, split_s=StepCosts().split_s)
    assert_close(measure(elements=elements, context=context), expected)


@pytest.mark.parametrize("context", [131_072, 8192])
@pytest.mark.parametrize("windowed", [10 / 12, 1.0])
def test_decodes_beyond_a_window_cost_the_reads_of_their_windows(measure, windowed, context):
    costs = replace(TRUE, window=1024, windowed=windowed)
    assert_close(measure(costs=costs, context=context), costs)


def test_short_contexts_leave_the_cost_of_seen_tokens_at_its_default(measure):
    default, found = StepCosts(), measure(context=256)
    assert found.seen_token_s == default.seen_token_s
    assert found.prompt_seen_s == default.prompt_seen_s
    assert found.step_s(64, 0, 64 * 256) == pytest.approx(TRUE.step_s(64, 0, 64 * 256))


def test_an_h200_is_measured_within_a_second(measure):
    measure(costs=StepCosts(), max_running=256)
    assert measure.took_s[-1] < 1.0


def test_a_slow_device_is_measured_without_its_largest_step(measure):
    rows = tuple(RowsTime(n, 5e-3 * n) for n in (1, 2, 32, 64, 512, 2048))
    slow = replace(TRUE, rows=rows, split_s=StepCosts().split_s)
    assert_close(measure(costs=slow), slow)
    assert measure.took_s[-1] < 2048 * 5e-3


def test_a_slow_devices_larger_steps_are_taken_to_cost_as_much_for_each_token(measure, monkeypatch):
    monkeypatch.setattr(ExactRunner, "prompt_sizes", ())  # no graphs, as on a CPU
    rows = tuple(RowsTime(n, 50e-3 * n) for n in (1, 2, 32, 128, 2048))
    slow = replace(TRUE, rows=rows, pieces_s=0.0, split_s=StepCosts().split_s)
    assert_close(measure(costs=slow), slow)
    assert measure.took_s[-1] < 512 * 50e-3


def test_a_single_adapter_gives_all_its_cost_to_the_rank(measure):
    found = measure(max_batch_adapters=1)
    assert found.lora_s == 0.0
    assert found.rank_s == pytest.approx(TRUE.rank_s + TRUE.lora_s / 16)


def test_an_arena_too_small_for_an_adapter_leaves_its_cost_at_the_default(measure):
    default = StepCosts()
    expected = replace(
        TRUE, lora_s=default.lora_s, rank_s=default.rank_s, lora_token_s=default.lora_token_s
    )
    assert_close(measure(elements=100), expected)


def test_an_engine_of_one_sequence_is_measured_with_one_decode(measure):
    found = measure(max_running=1, costs=replace(TRUE, max_running=1))
    assert found.step_s(1, 0, 5000) == pytest.approx(TRUE.step_s(1, 0, 5000))
    assert [tokens for tokens, _ in found.rows] == [1, 512, 2048]


def test_a_step_with_capacity_for_decodes_alone_is_measured_with_decodes(measure):
    found = measure(max_batch_tokens=64, costs=replace(TRUE, step_tokens=64))
    assert [tokens for tokens, _ in found.rows] == [1, 2, 32, 64]


@pytest.mark.parametrize("running", [64, 256, 512, 1024])
def test_the_cost_of_tokens_seen_by_prompts_is_measured_for_any_max_running(measure, running):
    costs = replace(TRUE, prompt_seen_s=4e-9, max_running=running)
    found = measure(max_running=running, costs=costs)
    assert found.prompt_seen_s == pytest.approx(4e-9)
    assert_close(found, replace(costs, rows=found.rows))


FLAT = replace(
    TRUE, rows=(RowsTime(1, 4e-3),), seen_token_s=0.0, prompt_seen_s=0.0, rank_s=0.0, lora_s=0.0
)


SEEING = replace(TRUE, rows=(RowsTime(1, 1e-9),), seen_token_s=1e-6)


@pytest.mark.parametrize("costs", [TRUE, FLAT, SEEING])
def test_noise_makes_no_coefficient_negative(measure, costs):
    for noise in (0.03, 0.1, 0.3, 1.0):
        found = measure(noise=noise, costs=costs, max_running=8)
        seen = found.seen_token_s, found.prompt_seen_s, found.split_s
        assert min(*seen, found.lora_s, found.lora_token_s) >= 0.0
        assert found.rank_s > 0.0
        seconds = [seconds for _, seconds in found.rows]
        assert seconds == sorted(seconds)
        assert found.step_s(found.max_running, 0) >= seconds[0] > 0.0


def test_steps_of_the_demo_model_take_about_the_measured_costs(tmp_path):
    torch.set_num_threads(1)
    settings = EngineSettings(DEMO, tmp_path, max_batch_tokens=256, max_running=16, overlap=False)
    engine = Engine(settings, source=None)
    costs = engine.info.step_costs
    answers, prompts_s, decodes_s = Answers(engine), [], []

    def step_s():
        began_s = time.perf_counter()
        answers.step()
        return time.perf_counter() - began_s

    for i in range(5):
        answers.submit(greedy(f"prompt {i}", prompt(256, i), max_tokens=1))
        prompts_s.append(step_s())
    for i in range(16):
        answers.submit(greedy(f"{i}", prompt(200, i), max_tokens=40))
    answers.until(lambda: sum(map(bool, answers.tokens.values())) == 5 + 16)
    for _ in range(10):
        decodes_s.append(step_s())
    assert len(answers.pending) == 16
    engine.close()
    assert 0.5 < min(prompts_s) / costs.prefill_s(256, 0) < 2.0
    assert 0.5 < min(decodes_s) / costs.step_s(16, 0, 16 * 220) < 2.0
