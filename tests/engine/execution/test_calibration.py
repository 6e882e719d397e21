"""What an engine says that its steps cost, against what they do cost."""

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lorikeet_engine.costs import StepCosts
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.execution import calibration
from lorikeet_engine.execution.calibration import measure_step_costs
from lorikeet_engine.kernels.lora.types import LoraWeights
from tests.engine.engine_driver import Answers, greedy, prompt
from tests.engine.hash_model import SHAPE

DEMO = Path(__file__).parents[3] / "demo/model"
TRUE = StepCosts(
    base_s=4e-3,
    sequence_s=20e-6,
    lora_s=0.3e-3,
    rank_s=1.3e-6,
    prompt_token_s=23e-6,
    lora_token_s=1.2e-6,
    step_tokens=512,
    max_running=64,
)
SETTINGS = EngineSettings(Path(), Path(), max_batch_tokens=512, max_running=64, max_rank=64)


class ExactRunner:
    """Takes what `costs` say, on a clock of its own; noise: the most by which a step is late."""

    def __init__(self, weights, costs=TRUE, noise=0.0):
        config = SimpleNamespace(max_context=1024)
        self.model = SimpleNamespace(device=torch.device("cpu"), config=config)
        self.weights, self.costs, self.noise = weights, costs, noise
        self.now_s, self.dice = 0.0, random.Random(3)

    def forward(self, batch):
        slots = [] if batch.segments is None else batch.segments.slots.tolist()
        ranks = sum(int(self.weights.table[slot, :, :, 2].max()) for slot in slots)
        tokens, sequences = len(batch.token_ids), len(batch.kv_lengths)
        if tokens == sequences:
            took_s = self.costs.decode_s(sequences, ranks)
        else:
            took_s = self.costs.prefill_s(tokens, ranks)
        self.now_s += took_s * (1.0 + self.dice.uniform(0.0, self.noise))


@pytest.fixture
def measure(monkeypatch):
    """The costs that are measured of a runner; elements: of the arena."""

    def measure(*, elements=1 << 20, noise=0.0, shape=SHAPE, costs=TRUE, **changes):
        table = torch.zeros(128, shape.layers, 7, 3, dtype=torch.int64)
        weights = LoraWeights(torch.zeros(elements), table)
        runner = ExactRunner(weights, costs, noise)
        clock = SimpleNamespace(perf_counter=lambda: runner.now_s)
        monkeypatch.setattr(calibration, "time", clock)
        found = measure_step_costs(runner, 1000, weights, shape, replace(SETTINGS, **changes))
        assert not table.any()
        return found

    return measure


def assert_close(found, expected):
    for name in StepCosts.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-9), name


@pytest.mark.parametrize("elements", [1 << 20, 20_000])
def test_exact_times_give_back_the_coefficients_that_made_them(measure, elements):
    assert_close(measure(elements=elements), TRUE)


def test_room_for_one_adapter_gives_its_whole_share_to_the_rank(measure):
    found = measure(max_batch_adapters=1)
    assert found.lora_s == 0.0
    assert found.rank_s == pytest.approx(TRUE.rank_s + TRUE.lora_s / 16)


def test_without_room_for_an_adapter_what_one_costs_is_the_default(measure):
    default = StepCosts()
    expected = replace(
        TRUE, lora_s=default.lora_s, rank_s=default.rank_s, lora_token_s=default.lora_token_s
    )
    assert_close(measure(elements=100), expected)


def test_an_engine_of_one_sequence_has_a_base_alone(measure):
    found = measure(max_running=1, costs=replace(TRUE, max_running=1))
    assert (found.base_s, found.sequence_s) == (pytest.approx(TRUE.decode_s(1, 0)), 0.0)


@pytest.mark.parametrize("costs", [TRUE, replace(TRUE, sequence_s=0.0, rank_s=0.0, lora_s=0.0)])
def test_noise_makes_no_coefficient_negative(measure, costs):
    for noise in (0.03, 0.1, 0.3, 1.0):
        found = measure(noise=noise, costs=costs, max_running=8)
        assert min(found.base_s, found.sequence_s, found.lora_s, found.lora_token_s) >= 0.0
        assert found.rank_s > 0.0
        assert found.prompt_token_s >= TRUE.prompt_token_s


def test_the_demo_model_takes_about_what_its_engine_says(tmp_path):
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
    assert 0.5 < min(decodes_s) / costs.decode_s(16, 0) < 2.0
