"""Cost coefficients against the measurements that they were fitted to (docs/benchmarks.md)."""

from dataclasses import replace

import pytest

from lorikeet.routing.ranking import H200_LLAMA_8B, capacity_per_s
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import seen_tokens

STEPS, LOADS = H200_LLAMA_8B.steps, H200_LLAMA_8B.loads
R16_BYTES = 83_886_080


@pytest.mark.parametrize(("sequences", "context", "ms"), [(1, 32, 4.25), (256, 320, 9.69)])
def test_a_step_of_decodes(sequences, context, ms):
    step_s = STEPS.step_s(sequences, 0, sequences * context)
    assert step_s == pytest.approx(ms / 1e3, rel=0.01)


@pytest.mark.parametrize(
    ("adapters", "rank", "ms"),
    [
        (1, 16, 0.27),
        (8, 16, 0.31),
        (32, 16, 0.91),
        (128, 16, 3.02),
        (64, 64, 5.66),
        (128, 64, 10.68),
        (128, 8, 1.80),
    ],
)
def test_adapters_lengthen_a_step(adapters, rank, ms):
    added_s = STEPS.step_s(128, adapters * rank) - STEPS.step_s(128, 0)
    assert added_s == pytest.approx(ms / 1e3, abs=0.25e-3)


@pytest.mark.parametrize(
    ("windowed", "length", "sees"),
    [
        (0.75, 1, 1),
        (0.75, 1024, 1024),
        (0.75, 5120, 2048),
        (1.0, 5120, 1024),
        (0.0, 5120, 5120),
    ],
)
def test_a_decode_sees_at_most_the_window_of_a_layer(windowed, length, sees):
    assert replace(STEPS, window=1024, windowed=windowed).decode_sees(length) == sees
    assert STEPS.decode_sees(length) == length


def test_long_contexts_cost_less_with_windowed_layers():
    gemma = replace(H200_LLAMA_8B, steps=replace(STEPS, window=1024, windowed=40 / 48))
    for prompt in (500, 8000):
        of_llama, of_gemma = (
            capacity_per_s(each, prompt, 300, 0) for each in (H200_LLAMA_8B, gemma)
        )
        assert (of_gemma > 1.2 * of_llama) == (prompt == 8000)
        assert (of_gemma == of_llama) == (prompt == 500)


def test_prompts():
    eight_s = STEPS.step_s(8192, 0, 0, seen=8 * seen_tokens(1024))
    assert eight_s == pytest.approx(185.8e-3, rel=0.03)
    assert STEPS.prefill_s(8192, 16) - STEPS.prefill_s(8192, 0) == pytest.approx(9.09e-3, rel=0.1)
    assert STEPS.prefill_s(1, 0) == pytest.approx(STEPS.step_s(1, 0))
    two_s = STEPS.rows_s(2048) + STEPS.rows_s(1)
    seen_s = STEPS.prompt_seen_s * 2049**2 / 2
    assert STEPS.prefill_s(2049, 0) == pytest.approx(two_s + seen_s + 2 * STEPS.pieces_s)


@pytest.mark.parametrize(("depth", "ms"), [(0, 5.8), (8192, 8.6), (32_768, 11.4), (122_880, 22.7)])
def test_a_chunk_of_few_tokens(depth, ms):
    step_s = STEPS.step_s(128, 0, 0, seen=seen_tokens(128, depth))
    assert step_s == pytest.approx(ms / 1e3, rel=0.1)


@pytest.mark.parametrize(
    ("depth", "ms"), [(0, 9.9), (8192, 15.0), (32_768, 19.1), (65_536, 25.2), (122_880, 35.9)]
)
def test_a_chunk_at_a_depth_beside_decodes(depth, ms):
    step_s = STEPS.step_s(64 + 192, 0, 64 * 1024, seen=seen_tokens(192, depth))
    assert step_s == pytest.approx(ms / 1e3, rel=0.06)


@pytest.mark.parametrize(
    ("tier", "ms"), [(Residency.GPU, 0.0), (Residency.HOST, 4.0), (Residency.DISK, 22.0)]
)
def test_loads(tier, ms):
    assert LOADS.load_s(tier, R16_BYTES) == pytest.approx(ms / 1e3, rel=0.01)


def test_capacity_is_the_rate_of_a_full_batch():
    # 256 sequences of 1 prompt token and 256 answer tokens each: one ends with every step.
    per_s = capacity_per_s(H200_LLAMA_8B, 1, 256, 0)
    step_s = STEPS.step_s(256, 0, 256 * 129)
    assert per_s == pytest.approx(1 / (STEPS.prompts_s(1, 0.5) + step_s))
