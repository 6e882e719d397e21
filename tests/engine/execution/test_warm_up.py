"""Warm-up of an engine: after it no kind of step compiles a kernel or allocates memory."""

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from loadtest.engine.random_model import random_model, write_config
from lorikeet_engine.adapter import Composition
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.execution import warm_up
from lorikeet_engine.execution.warm_up import run_every_kind_of_step, run_largest_step
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers, greedy, prompt

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
SETTINGS = EngineSettings(
    Path(),
    Path(),
    kv_bytes=16 << 20,
    max_batch_tokens=96,
    max_running=7,
    max_batch_adapters=5,
    max_rank=40,
    adapter_host_bytes=64 << 20,
)
RANKS = (1, 3, 8, 12, 16, 24, 32, 40)
OUTER_RANKS = (3, 12, 24, 40)  # on lm_head and embed_tokens, too


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "blobs")


@pytest.fixture
def refs(shelf):
    shape = BaseShape.from_config(CONFIG)
    everywhere = [(layer, linear) for layer in range(shape.layers) for linear in range(7)]
    outer = [(shape.outer_layer, shape.index(name)) for name in ("lm_head", "embed_tokens")]
    places = {r: everywhere + outer if r in OUTER_RANKS else everywhere for r in RANKS}
    return [shelf.make(f"r{r}", dict.fromkeys(at, r), shape=shape) for r, at in places.items()]


@pytest.fixture
def make(tmp_path, shelf, close_later):
    def make(**changes):
        model = write_config(tmp_path / "model", CONFIG)
        settings = replace(SETTINGS, model=model, cache_dir=tmp_path / "cache", **changes)
        return close_later(Engine(settings, shelf, random_model))

    return make


class Recorder:
    """Runner that records each step instead of computing it."""

    def __init__(self, runner):
        self.model, self.kv_windows, self.batches = runner.model, runner.kv_windows, []
        self.state_slots = runner.state_slots

    def share(self, _step, *, graphs):
        pass

    def forward(self, batch):
        self.batches.append(batch)
        return torch.zeros(len(batch.logit_rows), CONFIG["vocab_size"])

    forward_eager = forward


def answer(engine, refs):
    """Return the greedy tokens of one request for each adapter and of one without."""
    answers = Answers(engine)
    for i, ref in enumerate([None, *refs]):
        answers.submit(greedy(f"{i}", prompt(40 + i, i), adapter=ref))
    answers.all()
    return answers.tokens


def test_the_largest_warm_up_step_reaches_the_limits_of_the_settings(make):
    engine = make()
    recorder = Recorder(engine._runner)
    run_largest_step(recorder, engine._sampler, SETTINGS)
    (batch,) = recorder.batches
    assert len(batch.token_ids) == 96
    assert len(batch.logit_rows) == 7
    assert len(batch.segments) == 5
    assert batch.segments.max_rank == 40


def test_warm_up_steps_span_exactly_the_kinds_that_the_settings_allow(make):
    engine = make()
    recorder = Recorder(engine._runner)
    run_every_kind_of_step(recorder, engine._sampler, SETTINGS)
    batches = [batch for batch in recorder.batches if batch.segments]
    assert {len(batch.segments) for batch in batches} == {1, 2, 4, 5}
    assert {batch.segments.max_rank for batch in batches} == {1, 16, 32, 40}
    composed = {
        (b.segments.max_rank, b.segments.has_vectors) for b in batches if b.segments.composed
    }
    assert composed >= set(product((1, 16, 32, 40), (False, True)))
    heads = {(len(b.logit_rows), len(b.head_segments), b.head_segments.max_rank) for b in batches}
    few, dense = {(2, 1, rank) for rank in (1, 16, 32, 40)}, {(3, 1, rank) for rank in (1, 32, 40)}
    assert heads >= few | dense
    assert {len(batch.token_ids) for batch in batches} >= {1, 5, 5 + 2, 64 + 2}
    assert all(len(batch.token_ids) <= 96 for batch in recorder.batches)
    alone = {(len(b.token_ids), len(b.kv_lengths)) for b in recorder.batches if not b.segments}
    assert alone >= {(1, 1), (7, 7), (2, 1), (64, 1), (96, 1)}


def test_warm_up_steps_include_a_chunk_deep_in_a_prompt(make):
    engine = make()
    recorder = Recorder(engine._runner)
    run_every_kind_of_step(recorder, engine._sampler, SETTINGS)
    deepest = max(recorder.batches, key=lambda batch: batch.kv_lengths[0])
    assert (len(deepest.token_ids), deepest.kv_lengths.tolist()) == (96, [512])


def test_no_sequence_of_a_warm_up_exceeds_the_context(make):
    engine = make(max_context=10)
    recorder = Recorder(engine._runner)
    run_largest_step(recorder, engine._sampler, SETTINGS)
    run_every_kind_of_step(recorder, engine._sampler, SETTINGS)
    assert max(length for batch in recorder.batches for length in batch.kv_lengths) == 10


def test_warm_up_changes_no_token(make, refs):
    few = {"max_batch_adapters": 2, "max_rank": 8, "max_batch_tokens": 30}
    warm, cold = make(**few), make(**few)
    run_every_kind_of_step(warm._runner, warm._sampler, replace(SETTINGS, **few))
    assert answer(warm, refs[:3]) == answer(cold, refs[:3])


@pytest.mark.gpu
def test_no_traffic_compiles_a_kernel_after_the_warm_up(make, refs, monkeypatch):
    from flashinfer.jit.core import JitSpec
    from triton import knobs

    engine = make(device="cuda", dtype="bfloat16", adapter_dtype="bfloat16")
    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **kernel: compiled.append(kernel["repr"])
    )
    monkeypatch.setattr(JitSpec, "build_and_load", lambda self: compiled.append(self.name))
    answers, dice = Answers(engine), random.Random(5)
    for i in range(120):
        params = dice.choice(
            [
                {},
                {"temperature": 1.0},
                {"temperature": 0.7, "top_p": 0.9},
                {"presence_penalty": 1.0, "logit_bias": ((5, 2.0),), "logprobs": 4},
                {"repetition_penalty": 1.2},
            ]
        )
        composed = Composition(tuple(dice.sample(refs[:5], 3)), (1.0, -0.5, 1.5))
        tokens, ref = prompt(dice.randint(1, 200), i), dice.choice([None, composed, *refs])
        made = dice.randint(1, 40)
        answers.submit(greedy(f"{i}", tokens, adapter=ref, max_tokens=made, **params))
        for _ in range(dice.randint(0, 12)):
            answers.step()
    answers.all()
    assert not answers.errors
    assert compiled == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_hold_random_numbers_while_steps_are_timed_and_zeros_before_and_after(
    dtype, monkeypatch
):
    monkeypatch.setattr(warm_up, "_RANDOM_PAGES", 3)
    kv = torch.zeros(2, 2, 8, 16, 2, 64).to(dtype)
    with warm_up.random_kv(kv):
        of_pages = kv.float().flatten(3).transpose(0, 2).flatten(1)
        assert (of_pages.std(1) - 1.0).abs().max() < 0.2
        assert of_pages.isfinite().all()
    assert not kv.float().any()
