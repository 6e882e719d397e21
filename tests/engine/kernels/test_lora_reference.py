"""The reference LoRA operators against a dense float32 product, row by row."""

import subprocess
import sys

import pytest
import torch

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora import linear as product
from lorikeet_engine.kernels.lora.reference import add_lora, expand, shrink
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments

LAYERS, LINEARS, D_IN = 2, 7, 24
QKV = LoraGroup(linears=(0, 1, 2), d_in=D_IN, d_outs=(24, 8, 8))
DOWN = LoraGroup(linears=(6,), d_in=D_IN, d_outs=(40,))


def weights_of(ranks: list[dict[int, int]], group: LoraGroup, dtype: torch.dtype) -> LoraWeights:
    """Slot i has rank ranks[i][linear] (0 when absent) in every layer."""
    table = torch.zeros(len(ranks), LAYERS, LINEARS, 3, dtype=torch.int64)
    pieces, end = [], 0
    for slot, by_linear in enumerate(ranks):
        for layer in range(LAYERS):
            for s, linear in enumerate(group.linears):
                rank = by_linear.get(linear, 0)
                if not rank:
                    continue
                a, b = torch.randn(rank, group.d_in), torch.randn(rank, group.d_outs[s])
                table[slot, layer, linear] = torch.tensor([end, end + a.numel(), rank])
                pieces += [a.flatten(), b.flatten()]
                end += a.numel() + b.numel()
    return LoraWeights(torch.cat(pieces).to(dtype), table)


def segments_of(runs: list[tuple[int, int, int]], max_rank: int) -> Segments:
    slots, starts, lengths = torch.tensor(runs, dtype=torch.int32).reshape(-1, 3).T
    return Segments(slots, starts, lengths, max_rank)


def dense(
    x: torch.Tensor, weights: LoraWeights, runs: list, layer: int, group: LoraGroup
) -> torch.Tensor:
    """sum over segments of B @ (A @ x), one token at a time, in float32."""
    delta = torch.zeros(x.shape[0], sum(group.d_outs))
    for slot, start, length in runs:
        for token in range(start, start + length):
            column = 0
            for s, linear in enumerate(group.linears):
                a_at, b_at, rank = weights.table[slot, layer, linear].tolist()
                d_out = group.d_outs[s]
                a = weights.arena[a_at : a_at + rank * group.d_in].float().view(rank, group.d_in)
                b = weights.arena[b_at : b_at + rank * d_out].float().view(rank, d_out)
                if rank:
                    delta[token, column : column + d_out] = (a @ x[token].float()) @ b
                column += d_out
    return delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [QKV, DOWN])
@pytest.mark.parametrize(
    "runs",
    [
        [(0, 0, 1)],
        [(2, 3, 60)],
        [(1, 0, 5), (0, 5, 1), (2, 9, 40)],
        [],
    ],
)
def test_each_token_gets_its_own_adapter_and_no_other(dtype, group, runs):
    torch.manual_seed(0)
    ranks = [dict.fromkeys(group.linears, 8), {group.linears[0]: 3}, {group.linears[-1]: 16}]
    weights = weights_of(ranks, group, dtype)
    x = torch.randn(63, D_IN).to(dtype)
    y = torch.randn(63, sum(group.d_outs)).to(dtype)
    want = y.float() + dense(x, weights, runs, 1, group)
    add_lora(y, x, weights, segments_of(runs, 16), 1, group)
    # One rounding to dtype of a sum whose parts are at most as large as the largest output.
    tolerance = 4 * torch.finfo(dtype).eps * max(1.0, want.abs().max().item())
    torch.testing.assert_close(y.float(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_without_lora_equals_float64(dtype):
    x, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    x, weight, bias = (each.to(dtype) for each in (x, weight, bias))
    expected = x.double() @ weight.double().T + bias.double()
    # rounded once, after sums in float32
    torch.testing.assert_close(product.linear(x, weight, bias), expected.to(dtype))


def test_rows_without_an_adapter_are_zero_in_v_and_bit_equal_in_y():
    weights = weights_of([{0: 4, 1: 4, 2: 4}], QKV, torch.float32)
    x, y = torch.randn(9, D_IN), torch.randn(9, 40)
    before, segments = y.clone(), segments_of([(0, 2, 3)], 8)
    v = shrink(x, weights, segments, 0, QKV)
    expand(v, y, weights, segments, 0, QKV)
    assert v.dtype == torch.float32
    assert v.shape == (9, 3, 8)
    assert v[:2].eq(0).all()
    assert v[5:].eq(0).all()
    assert v[:, :, 4:].eq(0).all()
    assert torch.equal(y[:2], before[:2])
    assert torch.equal(y[5:], before[5:])
    assert not torch.equal(y[2:5], before[2:5])


def test_a_linear_of_rank_zero_is_unchanged():
    weights = weights_of([{1: 4}], QKV, torch.float32)
    x, y = torch.randn(3, D_IN), torch.randn(3, 40)
    before = y.clone()
    add_lora(y, x, weights, segments_of([(0, 0, 3)], 4), 0, QKV)
    assert torch.equal(y[:, :24], before[:, :24])
    assert torch.equal(y[:, 32:], before[:, 32:])


@pytest.mark.parametrize(("x_width", "y_width"), [(D_IN + 1, 40), (D_IN, 41)])
def test_tensors_that_do_not_fit_are_a_shape_error(x_width, y_width):
    weights = weights_of([{0: 4}], QKV, torch.float32)
    with pytest.raises(ShapeError):
        add_lora(
            torch.zeros(3, y_width),
            torch.zeros(3, x_width),
            weights,
            segments_of([(0, 0, 3)], 4),
            0,
            QKV,
        )


def test_importing_the_operators_on_a_cpu_imports_no_triton():
    code = "import sys, lorikeet_engine.models.llama; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
