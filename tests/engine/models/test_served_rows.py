"""Rows of weights in every format are read some at a time, with exactly the served values."""

import pytest
import torch

from lorikeet_engine.kernels import w4a16
from lorikeet_engine.kernels.fp8 import DTYPE, Fp8Rows, PartlyFp8
from lorikeet_engine.kernels.w4a16 import StackedWeight
from lorikeet_engine.models import served_rows
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.models.served_rows import ServedRows, _rows

WIDTH = 64


def fp8_rows(height, block=None):
    scales = torch.rand(height) + 0.5
    if block is not None:
        scales = torch.rand(-(-height // block[0]), -(-WIDTH // block[1])) + 0.5
    return Fp8Rows(torch.randn(height, WIDTH).to(DTYPE), scales, block)


def packed(height):
    q = torch.randint(16, (height, WIDTH)).byte()
    return w4a16.pack(q, torch.rand(height, WIDTH // 32), None)


def floats(weight):
    if isinstance(weight, PartlyFp8):
        return torch.cat([weight.first.floats(), weight.others.float()])
    if isinstance(weight, StackedWeight):
        return torch.cat([floats(part) for part in weight.parts])
    return weight.float() if isinstance(weight, torch.Tensor) else weight.floats()


@pytest.mark.parametrize("at_once", [WIDTH, 9 * WIDTH, 1 << 20])
@pytest.mark.parametrize(("begin", "end"), [(0, 48), (16, 40), (32, 48)])
@pytest.mark.parametrize(
    "kind", ["floats", "bfloat16", "fp8", "fp8 blocks", "partly fp8", "4 bits", "stacked"]
)
def test_rows_are_the_served_values(kind, begin, end, at_once, monkeypatch):
    torch.manual_seed(0)
    weight = {
        "floats": lambda: torch.randn(48, WIDTH),
        "bfloat16": lambda: torch.randn(48, WIDTH).bfloat16(),
        "fp8": lambda: fp8_rows(48),
        "fp8 blocks": lambda: fp8_rows(48, (8, 32)),
        "partly fp8": lambda: PartlyFp8(fp8_rows(36), torch.randn(12, WIDTH)),
        "4 bits": lambda: packed(48),
        "stacked": lambda: StackedWeight((packed(20), torch.randn(8, WIDTH), packed(20))),
    }[kind]()
    monkeypatch.setattr(served_rows, "_ELEMENTS_AT_ONCE", at_once)
    pieces = list(_rows(weight, begin, end))
    assert torch.equal(torch.cat(pieces), floats(weight)[begin:end])
    assert max(map(len, pieces)) * WIDTH <= max(at_once, 8 * WIDTH)


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "qwen3_moe", "gemma4_e_text", "nemotron_h", "deepseek_v3"]
)
def test_every_linear_that_can_have_vectors_is_found(family, tiny_checkpoints):
    model = load_model(tiny_checkpoints[family], torch.device("cpu"), torch.float32)
    shape = model.config.shape
    rows = ServedRows(model)
    for layer in range(shape.layers):
        for index, linear in enumerate(shape.linears):
            absorbed = linear.module.endswith("kv_b_proj")
            if shape.has(layer, index) and not linear.of_experts and not absorbed:
                d_in, d_out = shape.dims(index)
                facts = rows.facts(layer, index, torch.zeros(1, d_in), torch.zeros(1, d_out))
                assert facts.squares.shape == (d_out,)
                assert (facts.squares > 0).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_squares_are_those_of_the_sum_of_weight_and_lora(kind, tiny_checkpoints):
    torch.manual_seed(0)
    model = load_model(tiny_checkpoints["llama"], torch.device("cpu"), getattr(torch, kind))
    rows, index = ServedRows(model), model.config.shape.index("up_proj")
    d_in, d_out = model.config.shape.dims(index)
    (weight,) = (
        linear.weight[d_out:].clone()
        for linear in model.linears()
        if linear.layer == 1 and index in linear.group.linears
    )
    for size in (0.01, 1.0, 30.0):  # beside weights of about 0.02
        a, b = torch.randn(5, d_in), size * torch.randn(5, d_out)
        want = (weight.double() + b.double().t() @ a.double()).square().sum(1)
        got = rows.facts(1, index, a, b).squares
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    got = rows.facts(1, index, torch.eye(5, d_in), -weight.float().t()[:5]).squares
    torch.testing.assert_close(got, weight[:, 5:].float().square().sum(1), rtol=1e-5, atol=1e-7)
