"""Inter-token goal of an engine on a device whose steps grow with the ranks in them."""

from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.engine.random_model import write_config
from lorikeet_engine.adapter import Residency
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution import step_timer, steps
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.scheduling import step_counters
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers, greedy
from tests.engine.hash_model import CONFIG, PAGE, SHAPE, HashModel

BASE_S, SEQUENCE_S, SLOPE_S = 4e-3, 20e-6, 50e-6
SEEN_S, PROMPT_SEEN_S = 30e-9, 1.5e-9
GOAL_S = 7e-3  # 24 sequences leave room for Σ rank 50
RANKS = (4, 4, 8, 8, 16, 16, 32, 32)


class SlowModel(HashModel):
    """HashModel whose steps take time on a clock of its own, by the ranks in the adapter table.

    seen: whether attention takes time, too.
    """

    seen = False

    def __init__(self, config):
        super().__init__(config)
        self.now_s, self.decodes_s, self.mixed_s = 0.0, [], []

    def perf_counter(self):
        return self.now_s

    def forward(self, batch, kv, lora, attention, states=None):
        slots = [] if batch.segments is None else batch.segments.slots.tolist()
        ranks = sum(int(lora.table[slot, :, :, 2].max()) for slot in slots)
        step_s = BASE_S + SEQUENCE_S * len(batch.token_ids) + SLOPE_S * ranks
        if self.seen:
            step_s += self.seen_s(batch)
        if len(batch.token_ids) == len(batch.kv_lengths):
            self.decodes_s.append(step_s)
        elif 1 in np.diff(batch.query_starts):
            self.mixed_s.append(step_s)
        self.now_s += step_s
        return super().forward(batch, kv, lora, attention)

    def seen_s(self, batch):
        lengths, ends = np.diff(batch.query_starts).astype(np.int64), batch.kv_lengths
        prompts = lengths > 1
        seen = (lengths * (ends - lengths / 2))[prompts].sum()
        return SEEN_S * ends[~prompts].sum() + PROMPT_SEEN_S * seen


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "blobs")


@pytest.fixture
def refs(shelf):
    return [shelf.make(f"{i}", {(0, 0): r}, shape=SHAPE) for i, r in enumerate(RANKS)]


@pytest.fixture
def make(tmp_path, shelf, monkeypatch, close_later):
    def make(*, seen=False, context=4096, **settings):
        folder = tmp_path / "model"
        write_config(folder, {**CONFIG, "max_position_embeddings": context})
        model = SlowModel(ModelConfig.from_folder(folder))
        model.seen = seen
        for module in (step_timer, steps, step_counters):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=model.perf_counter))
        sizes = {"kv_bytes": 1 << 20, "max_running": 24, "adapter_gpu_bytes": 1 << 20, **settings}
        settings = EngineSettings(folder, tmp_path / "cache", page_size=PAGE, **sizes)
        return close_later(Engine(settings, shelf, lambda *_, **__: model)), model

    return make


def serve(engine, refs):
    """Run many concurrent requests for every adapter and for none."""
    answers = Answers(engine)
    for ref in refs:
        engine.pin(ref)
    answers.until(lambda: all(engine.residency(ref) is Residency.GPU for ref in refs))
    for i in range(200):
        ref = [*refs, None][i * 7 % (len(refs) + 1)]
        answers.submit(greedy(f"{i}", [3, 4, 5 + i % 50], adapter=ref, max_tokens=5 + i % 20))
    answers.all()
    assert not answers.errors
    assert len(answers.finish) == 200


@pytest.mark.parametrize("overlap", [False, True])
def test_most_steps_keep_a_goal_that_few_would_keep_without_it(make, refs, overlap):
    kept = {}
    for goal_s in (None, GOAL_S):
        engine, model = make(inter_token_goal_s=goal_s, overlap=overlap)
        model.decodes_s.clear()
        serve(engine, refs)
        within = [step_s <= 1.05 * GOAL_S for step_s in model.decodes_s]
        kept[goal_s] = sum(within) / len(within)
    assert kept[None] < 0.4
    assert kept[GOAL_S] > 0.95


def mixed_s(engine, model, tokens=1900, decodes=60):
    """Return the seconds of the steps that compute a prompt of `tokens` beside eight decodes."""
    answers = Answers(engine)
    for i in range(8):
        answers.submit(greedy(f"{i}", [3, 4, 5 + i], max_tokens=decodes))
    answers.until(lambda: len(engine._scheduler.running) == 8)
    model.mixed_s.clear()
    answers.submit(greedy("long", [7] * tokens, max_tokens=2))
    answers.until(lambda: "long" not in answers.pending)
    assert not answers.errors
    assert len(answers.pending) == 8
    return model.mixed_s


def test_steps_with_a_long_prompt_keep_a_goal_that_they_would_exceed_without_it(make):
    goal_s = 2 * GOAL_S
    assert max(mixed_s(*make())) > 2 * goal_s
    assert max(mixed_s(*make(inter_token_goal_s=goal_s))) <= 1.05 * goal_s


def test_steps_deep_in_a_prompt_of_100_000_tokens_keep_the_goal_and_use_it_fully(make):
    goal_s, long = 40e-3, {"seen": True, "context": 131_072, "kv_bytes": 8 << 20}
    taken_s = mixed_s(*make(**long), 100_000, 1000)
    assert 1.1 * goal_s < max(taken_s) < 1.3 * goal_s, "as long as a full step at depth 0"
    kept_s = mixed_s(*make(**long, inter_token_goal_s=goal_s), 100_000, 1000)
    assert max(kept_s) <= 1.05 * goal_s
    assert sum(kept_s) < 1.15 * sum(taken_s)


def test_an_unreachable_goal_lets_one_adapter_run_at_a_time(make, refs):
    engine, model = make(inter_token_goal_s=BASE_S / 2)
    model.decodes_s.clear()
    serve(engine, refs)
    assert max(model.decodes_s) <= BASE_S + 24 * SEQUENCE_S + max(RANKS) * SLOPE_S


@pytest.mark.parametrize("arena_bytes", [1 << 20, 40_000, 5_000])
def test_measuring_the_cost_of_a_rank_leaves_the_arena_empty(make, arena_bytes):
    engine, _ = make(inter_token_goal_s=GOAL_S, adapter_gpu_bytes=arena_bytes)
    base_s = BASE_S + 24 * SEQUENCE_S
    assert engine._step_budget.max_ranks(0) == pytest.approx((GOAL_S - base_s) / SLOPE_S)
    assert not engine._tiers.weights.table.any()


def test_an_arena_too_small_to_measure_in_is_refused(make):
    with pytest.raises(SettingsError, match="adapter_gpu_bytes=200"):
        make(inter_token_goal_s=GOAL_S, adapter_gpu_bytes=200)
