"""A product with one row equals torch's; without a GPU the kernel runs in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.fp8 import Fp8Rows, quantize_weight
from lorikeet_engine.kernels.gemv import gemv, gemv_act_and_mul
from lorikeet_engine.kernels.pointwise.fused import act_and_mul
from tests.engine.interpreter import INTERPRETED, kinds

KINDS = kinds(torch.bfloat16, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("d_out", "d_in"), [(8, 64), (7, 100), (33, 2048), (5, 3000)])
def test_one_row(kind, biased, d_out, d_in):
    device, dtype = kind
    random = torch.Generator().manual_seed(d_in)
    x, weight, bias = (
        torch.randn(shape, generator=random).to(device, dtype)
        for shape in ((1, d_in), (d_out, d_in), (d_out,))
    )
    got = gemv(x, weight, bias if biased else None)
    want = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert got.shape == (1, d_out)
    atol = 2 * torch.finfo(dtype).eps * want.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("stored", ["floats", "fp8"])
@pytest.mark.parametrize(("width", "d_in"), [(8, 64), (7, 112), (33, 2048), (5, 3008), (2, 8192)])
def test_one_row_gated(kind, biased, gelu, stored, width, d_in):
    assert_gated(kind, biased, gelu, stored, width, d_in)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "d_in"), [(7, 112), (5, 3008)])
def test_one_row_gated_of_numbers_whose_blocks_have_scales(kind, width, d_in):
    assert_gated(kind, True, False, "blocks", width, d_in)


def assert_gated(kind, biased, gelu, stored, width, d_in):
    device, dtype = kind
    random = torch.Generator().manual_seed(d_in)
    x = torch.randn(1, d_in, generator=random).to(device, dtype)
    weight = (torch.randn(2 * width, d_in, generator=random) * 2 * d_in**-0.5).to(device, dtype)
    bias = torch.randn(2 * width, generator=random).to(device, dtype) if biased else None
    floats = weight.double()
    if stored != "floats":
        weight = quantize_weight(weight)
        if stored == "blocks":
            scales = torch.rand(-(-2 * width // 4), -(-d_in // 32), generator=random) * d_in**-0.5
            weight = Fp8Rows(weight.rows, scales.to(device) / 100, (4, 32))
        floats = weight.floats().double()
    got = gemv_act_and_mul(x, weight, bias, gelu=gelu)
    y = F.linear(x.double(), floats, bias.double() if biased else None)
    gates, values = y.chunk(2, dim=1)
    want = (F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)) * values
    assert got.shape == (1, width)
    atol = 4 * torch.finfo(dtype).eps * max(want.abs().max().item(), y.abs().max().item() ** 2)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)
    in_two = act_and_mul(gemv(x, weight, bias), gelu=gelu)
    rtol = 0.0 if INTERPRETED else torch.finfo(dtype).eps
    torch.testing.assert_close(got, in_two, rtol=rtol, atol=0)
