"""Prediction of a base model's rate from Llama's row: bytes, operations and windows."""

import json
from argparse import ArgumentTypeError

import pytest
import torch

from loadtest.engine import prefill
from loadtest.engine.offline import Work
from loadtest.engine.predicted import (
    BYTES_PER_S,
    OPERATIONS_PER_S,
    WORK,
    Roofline,
    predicted_tokens_per_s,
    read_llama,
)
from loadtest.engine.random_model import CONFIGS, write_config
from lorikeet_engine.kernels.attention import why_slow
from lorikeet_engine.models.config import ModelConfig


@pytest.fixture
def roofline(tmp_path):
    def roofline(name, **changes):
        weights = {key: changes.pop(key) for key in ("fp8_weights", "fp8_kv") if key in changes}
        folder = write_config(tmp_path / "model", {**CONFIGS[name], **changes})
        return Roofline(ModelConfig.from_folder(folder), **weights)

    return roofline


# elements of published checkpoints; Gemma's without the vision tower
PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, 65 * 4096),
    "qwen3-8b": (8_190_735_360, 73 * 4096 + 36 * 2 * 128),
    "phi-4": (14_659_507_200, 81 * 5120),
    "gemma-3-12b": (11_766_034_176, 193 * 3840 + 48 * 2 * 256),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shapes_equal_the_published_checkpoints(roofline, name):
    elements, norms = PUBLISHED[name]
    model = roofline(name)
    outside = model.head_elements * (1 if model.config.tied_embeddings else 2)
    assert model.linear_elements + outside + norms == elements
    assert why_slow(model.config.shape.head_dim, torch.bfloat16) is None


def test_five_of_six_layers_of_gemma_have_a_window(roofline):
    windows = roofline("gemma-3-12b").config.windows
    assert windows == 8 * (1024, 1024, 1024, 1024, 1024, None)
    for name in ("llama-3.1-8b", "qwen3-8b", "phi-4"):
        assert set(roofline(name).config.windows) == {None}


def test_llamas_prediction_is_its_measurement(roofline):
    assert predicted_tokens_per_s(roofline("llama-3.1-8b"), 11_891) == pytest.approx(11_891)


def test_every_model_has_llamas_share_of_the_roofline(roofline):
    model = roofline("gemma-3-12b")
    assert predicted_tokens_per_s(model, 9_000) == pytest.approx(
        0.75 * predicted_tokens_per_s(model, 12_000)
    )


def test_llamas_bytes_and_operations_equal_known_numbers(roofline):
    llama = roofline("llama-3.1-8b")
    elements = llama.linear_elements + llama.head_elements
    # docs/benchmarks.md: 3.7 ms for the weights, less the embeddings, and 2.5 of keys and values
    assert llama.step_s(1, 1) == pytest.approx(2 * elements / BYTES_PER_S, rel=1e-4)
    assert 256 * llama.kv_bytes(320) / BYTES_PER_S == pytest.approx(2.5e-3, rel=0.01)
    assert llama.prompts_s(WORK) == pytest.approx(
        prefill.flops(llama.config, 256, 256) / OPERATIONS_PER_S
    )
    steps_s = sum(llama.step_s(256, 256 + i) for i in range(1, 128))
    all_s = llama.prompts_s(WORK) + steps_s
    assert llama.tokens_per_s(WORK) == pytest.approx(256 * 128 / all_s)


def test_many_sequences_are_bound_by_operations_and_few_by_bytes(roofline):
    llama = roofline("llama-3.1-8b")
    elements = llama.linear_elements + llama.head_elements
    many = llama.step_s(256, 1) - 256 * (llama.kv_bytes(1) + 2 * 4096) / BYTES_PER_S
    assert many == pytest.approx(2 * elements * 256 / OPERATIONS_PER_S)
    few = llama.step_s(16, 1) - 16 * (llama.kv_bytes(1) + 2 * 4096) / BYTES_PER_S
    assert few == pytest.approx(2 * elements / BYTES_PER_S)


def test_windows_bound_the_reads_and_operations_of_attention(roofline):
    gemma, whole = roofline("gemma-3-12b"), roofline("gemma-3-12b", sliding_window=None)
    token = 2 * 8 * 256 * 2  # a layer's keys and values
    assert gemma.kv_bytes(1024) == whole.kv_bytes(1024) == 48 * 1024 * token
    assert gemma.kv_bytes(8192) == token * (40 * 1024 + 8 * 8192)
    assert whole.kv_bytes(8192) == token * 48 * 8192
    long = Work("base", 4096, 2, requests=1)
    pairs_less = 40 * (4096 * 4097 // 2 - (1024 * 1025 // 2 + 3072 * 1024))
    less = 4 * 16 * 256 * pairs_less
    assert whole.prompts_s(long) - gemma.prompts_s(long) == pytest.approx(less / OPERATIONS_PER_S)


def test_heads_are_read_with_their_padding(roofline):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    narrow = roofline("llama-3.1-8b", head_dim=96, **heads)
    assert narrow.kv_bytes(1) == 32 * 2 * 128 * 2


def test_fp8_halves_the_bytes_of_linears_and_kv(roofline):
    llama, fp8 = roofline("llama-3.1-8b"), roofline("llama-3.1-8b", fp8_weights=True)
    halved = llama.linear_elements / BYTES_PER_S
    assert llama.step_s(1, 1) - fp8.step_s(1, 1) == pytest.approx(halved)
    assert 2 * roofline("llama-3.1-8b", fp8_kv=True).kv_bytes(300) == llama.kv_bytes(300)
    assert fp8.prompts_s(WORK) < 0.55 * llama.prompts_s(WORK)


def test_a_large_vocabulary_costs_a_head_in_every_step(roofline):
    large, small = roofline("gemma-3-12b"), roofline("gemma-3-12b", vocab_size=128)
    less = 2 * (262208 - 128) * 3840 / BYTES_PER_S
    assert large.step_s(1, 1) - small.step_s(1, 1) == pytest.approx(less)


def test_mixtures_of_experts_are_refused(roofline):
    with pytest.raises(ValueError, match="dense"):
        roofline("qwen3-30b-a3b")


@pytest.fixture
def run(tmp_path):
    """Write the JSON file of a run, as throughput does."""

    def run(rows, **about):
        file = tmp_path / "run.json"
        known = {"config": "llama-3.1-8b", "weight_dtype": "auto", "kv_dtype": "auto"}
        known["tensor_parallel"] = 1
        rows = [
            {
                "work": {"name": name, "prompt_tokens": lengths[0], "output_tokens": lengths[1]},
                "tokens_per_s": rates,
            }
            for name, lengths, rates in rows
        ]
        file.write_text(json.dumps({**known, **about, "throughput": rows}))
        return str(file)

    return run


def test_llamas_row_is_read_from_its_run_or_given(run):
    rows = [("base", (16, 256), [3, 3]), ("8 adapters", (256, 128), [2, 2])]
    assert read_llama(run([*rows, ("base", (256, 128), [11_891.5, 11_800])])) == 11_891.5
    assert read_llama("11,891") == 11_891
    with pytest.raises(ArgumentTypeError, match="no row base 256/128"):
        read_llama(run(rows))
    others = {"config": "phi-4", "weight_dtype": "fp8", "kv_dtype": "fp8", "tensor_parallel": 2}
    for about in ({key: value} for key, value in others.items()):
        with pytest.raises(ArgumentTypeError, match="in 16 bits on one GPU"):
            read_llama(run([("base", (256, 128), [1])], **about))
    with pytest.raises(ArgumentTypeError, match="want tokens/s"):
        read_llama("no such file.json")
