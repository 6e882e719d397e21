"""A checkpoint of floats is served in FP8, linear by linear, as a model of rounded numbers says.

Sums of the same numbers in another order differ by 1e-7. Where one lies just below the middle
between two FP8 numbers and the other just above, the rounded inputs differ by a 16th: that comes
once or twice in a test's 20,000 inputs, so most tokens' logits are equal, and all are near.
"""

import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.models import checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model, rehearse_load
from tests.engine.conftest import FAMILIES, HYBRID, MOE, PagedTokens
from tests.engine.models.fp8_models import rounded_model
from tests.engine.models.test_models import EPS, Run, prompt_of, random_adapter

CPU = torch.device("cpu")
NEAR = 0.1
PROMPT = prompt_of(40)


def load(folder, dtype=torch.float32):
    return load_model(folder, CPU, dtype, rounding=Quantization.FP8)


def logits(model):
    run = Run(None, PagedTokens(), model=model)
    run.step({"a": PROMPT[:37]})
    for token in PROMPT[37:]:
        run.step({"a": [token]})
    return run.of("a")


def errors(got, want):
    """Relative error of each token's logits."""
    return (got - want).norm(dim=1) / want.norm(dim=1)


def assert_near(got, want):
    assert errors(got, want).median() <= 100 * EPS
    assert errors(got, want).max() <= NEAR


@pytest.mark.parametrize("name", [*FAMILIES, *MOE, *HYBRID, "biased", "tied", "sharded"])
def test_logits_equal_a_model_of_rounded_numbers(tiny_checkpoints, name):
    folder = tiny_checkpoints[name]
    model = load(folder)
    with torch.inference_mode():
        want = rounded_model(folder)(torch.tensor([PROMPT])).logits[0]
    assert_near(logits(model), want)
    plain = logits(load_model(folder, CPU, torch.float32))
    assert errors(plain, want).median() > NEAR / 2, "rounding is to be seen"


def test_adapters_read_the_inputs_as_they_were(tiny_checkpoints):
    folder, tokens = tiny_checkpoints["qwen2"], PagedTokens()
    shape = ModelConfig.from_folder(folder).shape
    lora, changes = random_adapter(shape, rank=3)
    run = Run(None, tokens, lora=lora, model=load(folder))
    segments = Segments(*(torch.tensor([n], dtype=torch.int32) for n in (0, 0, 40)), max_rank=3)
    got = run.runner.forward(replace(tokens.batch({"a": PROMPT}), segments=segments))
    model = rounded_model(folder)
    for name, change in changes:
        linear = model.get_submodule(name.removesuffix(".weight"))
        linear.register_forward_hook(lambda _, x, y, change=change: y + x[0] @ change.T)
    with torch.inference_mode():
        assert_near(got, model(torch.tensor([PROMPT])).logits[0])


def linears_of(layer):
    """The weights that are rounded: all but a router's."""
    weights = [layer.mixer.inputs.weight, layer.mixer.o.weight]
    routed = [each for each in (layer.mlp, layer.experts) if hasattr(each, "experts")]
    for each in routed:
        assert each.router.weight.is_floating_point()
        weights += [each.experts.gate_up, each.experts.down]
    if layer.mlp not in routed:
        weights += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rehearsal_knows_the_bytes_of_fp8_weights(tiny_checkpoints, dtype):
    every = (*FAMILIES, *MOE)
    for name in every[dtype is torch.bfloat16 :: 2]:
        folder = tiny_checkpoints[name]
        plain = rehearse_load(folder, dtype)[1]
        found = rehearse_load(folder, dtype, rounding=Quantization.FP8)[1]
        linears = [weight for layer in load(folder, dtype)._layers for weight in linears_of(layer)]
        assert all(isinstance(weight, Fp8Rows) for weight in linears)
        saved = sum(w.rows.numel() * dtype.itemsize - w.nbytes for w in linears)
        assert found == plain - saved


def test_no_linear_in_floats_is_held_when_the_next_is_rounded(tiny_checkpoints, monkeypatch):
    seen, round_it, set_result = [], checkpoint.quantize_weight, Future.set_result

    def slowly(future, result):
        set_result(future, result)
        time.sleep(0.005)  # a reading thread that goes on late

    def watched(weight):
        assert all(floats.expired() for floats in seen)
        seen.append(StorageWeakRef(weight.untyped_storage()))
        return round_it(weight)

    monkeypatch.setattr(Future, "set_result", slowly)
    monkeypatch.setattr(checkpoint, "quantize_weight", watched)
    load(tiny_checkpoints["llama"], torch.bfloat16)
    assert len(seen) == 2 * 2 * 4  # once on the meta device
