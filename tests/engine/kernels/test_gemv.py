"""A product with one row equals torch's; without a GPU the kernel runs in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.gemv import gemv
from tests.engine.interpreter import INTERPRETED

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS = (
    [("cpu", torch.float32), ("cpu", torch.float16)]
    if INTERPRETED
    else [pytest.param(("cuda", dtype), marks=on_gpu) for dtype in (torch.bfloat16, torch.float16)]
)


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
