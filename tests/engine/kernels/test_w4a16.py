"""Linears of 4 bits: the product of exactly the format's values, by torch on the CPU and by CUDA's
kernels.

Without a GPU the kernels run in Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch

from lorikeet_engine.kernels import w4a16
from lorikeet_engine.kernels.lora.linear import linear
from lorikeet_engine.kernels.split_k import ProductConfig
from lorikeet_engine.kernels.w4a16 import StackedWeight, fused, pack, stack
from tests.engine.interpreter import INTERPRETED, kinds
from tests.engine.kernels.definitions import in_torch

reference = in_torch(w4a16)

KINDS = kinds(torch.bfloat16, torch.float16, torch.float32)
LEVELS = torch.linspace(-1, 1, 16) ** 3
ROUNDED = torch.float16 if INTERPRETED else torch.bfloat16
# Numbers of inputs of a group: several, one of all inputs, and NF4's.
STORED = ["32", "64", "64 without zeros", "whole", "act-order", "nf4"]


def drawn(stored, d_out, d_in, scale_dtype=torch.float16):
    """A packed weight, and its values in float64 by their definition."""
    random = torch.Generator().manual_seed(d_out + d_in)
    group = {"32": 32, "whole": d_in}.get(stored, 64)
    q = torch.randint(16, (d_out, d_in), generator=random)
    scales = (torch.rand(d_out, d_in // group, generator=random) / 20 + 0.01).to(scale_dtype)
    group_of = torch.arange(d_in) // group
    if stored == "act-order":
        group_of = group_of[torch.randperm(d_in, generator=random)]
    of_input = scales.double()[:, group_of]  # [d_out, d_in]
    if stored == "nf4":
        weight = pack(q.byte(), scales.float(), None, levels=LEVELS, rounded=ROUNDED)
        return weight, (LEVELS.double()[q] * of_input).to(ROUNDED).double()
    zeros = torch.randint(17, scales.shape, generator=random)
    if stored == "64 without zeros":
        zeros.fill_(8)
    values = (q - zeros[:, group_of]) * of_input
    kept = None if stored == "64 without zeros" else zeros.byte()
    return pack(q.byte(), scales, kept, group_of), values


def moved(weight, device):
    tensors = ("codes", "scales", "zeros", "order", "levels")
    there = {name: getattr(weight, name) for name in tensors}
    there = {name: each if each is None else each.to(device) for name, each in there.items()}
    return replace(weight, **there)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("d_out", "d_in"), [(8, 64), (7, 192), (133, 128)])
def test_a_packed_weight_has_the_exact_values_of_its_format(stored, d_out, d_in, scale_dtype):
    weight, values = drawn(stored, d_out, d_in, scale_dtype)
    assert torch.equal(weight.floats().double(), values)


@pytest.mark.parametrize(("stored", "bits"), [
    ("64", 4 + 16 / 64 + 8 / 64), ("64 without zeros", 4 + 16 / 64), ("32", 4 + 24 / 32),
    ("nf4", 4 + 32 / 64),
])  # fmt: skip
def test_a_packed_weight_takes_at_most_three_tenths_of_bfloat16s_bytes(stored, bits):
    weight, _ = drawn(stored, 256, 512)
    levels = 64 * (stored == "nf4")
    assert weight.nbytes - levels == 256 * 512 * bits / 8 <= 0.3 * 256 * 512 * 2


@pytest.mark.parametrize("stored", STORED)
def test_some_outputs_of_a_packed_weight_are_those_of_the_whole(stored):
    weight, values = drawn(stored, 24, 128)
    assert torch.equal(weight.part(range(3, 17), range(128)).floats().double(), values[3:17])


@pytest.mark.parametrize(("stored", "columns"), [
    ("32", range(64, 192)), ("64", range(32, 96)), ("64", range(64, 192)), ("64", range(64, 96)),
    ("64 without zeros", range(128)), ("whole", range(96, 192)), ("nf4", range(32, 160)),
])  # fmt: skip
def test_some_inputs_of_a_packed_weight_are_those_of_the_whole(stored, columns):
    weight, values = drawn(stored, 24, 192)
    part = weight.part(range(24), columns)
    assert torch.equal(part.floats().double(), values[:, columns.start : columns.stop])
    assert part.group >= 32


def test_inputs_that_share_bytes_or_have_an_order_are_not_parted():
    with pytest.raises(ValueError, match="16 to 64 are no multiples of 32"):
        drawn("64", 8, 128)[0].part(range(8), range(16, 64))
    with pytest.raises(ValueError, match="act-order"):
        drawn("act-order", 8, 128)[0].part(range(8), range(64))


def test_groups_that_cannot_be_packed_are_refused():
    q, scales = torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2)
    with pytest.raises(ValueError, match="different sizes"):
        pack(q, scales, None, torch.tensor([0] * 40 + [1] * 24))
    with pytest.raises(ValueError, match="multiples of 32"):
        pack(q, torch.ones(8, 4), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("stored", STORED)
def test_a_linear_multiplies_the_exact_values(stored, tokens, dtype):
    weight, values = drawn(stored, 40, 192)
    x, bias, _ = operands(("cpu", dtype), tokens, 40, 192)
    got = linear(x, weight, bias)
    assert got.dtype == dtype
    assert_near(got, x.double() @ values.T + bias.double(), x, values)


def test_fused_linears_of_different_kinds_are_multiplied_one_after_the_other():
    made = [drawn(stored, 24, 192) for stored in ("32", "act-order", "nf4")]
    floats = torch.randn(5, 192)
    weight = StackedWeight((*(each for each, _ in made), floats))
    values = torch.cat([*(each for _, each in made), floats.double()])
    x, bias, _ = operands(("cpu", torch.float32), 3, len(values), 192)
    assert_near(linear(x, weight, bias), x.double() @ values.T + bias.double(), x, values)
    assert linear(x, weight).shape == (3, 77)


@pytest.mark.parametrize("stored", STORED)
def test_linears_that_go_with_one_another_are_stacked(stored):
    parts = [drawn(stored, 24, 192)[0].part(range(a, b), range(192)) for a, b in ((0, 8), (3, 20))]
    assert parts[0].goes_with(parts[1])
    assert torch.equal(stack(parts).floats(), torch.cat([part.floats() for part in parts]))


def test_linears_of_different_orders_or_groups_are_not_stacked():
    one = drawn("act-order", 24, 192)[0]
    for other in (drawn("act-order", 25, 192)[0], *(drawn(s, 24, 192)[0] for s in STORED[:4])):
        assert not one.goes_with(other)


def operands(kind, tokens, d_out, d_in):
    device, dtype = kind
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, d_in, generator=random).to(device, dtype)
    return x, torch.randn(d_out, generator=random).to(device, dtype), device


def assert_near(got, want, x, values):
    """Compare with the exact product: a rounding of each float32 sum, and one of the result."""
    lost = x.shape[1] * torch.finfo(torch.float32).eps * (x.double().abs() @ values.abs().T)
    error = torch.finfo(got.dtype).eps * want.abs() + lost
    assert ((got.double() - want).abs() <= error).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 3, 8])  # 8: some have no columns
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("tokens", "d_out"), [(1, 64), (5, 72 if INTERPRETED else 200), (33, 96)])
def test_the_kernel_multiplies_the_exact_values(kind, tokens, d_out, stored, split):
    weight, values = drawn(stored, d_out, 192)
    x, bias, device = operands(kind, tokens, d_out, 192)
    config = ProductConfig(64, 128, split, warps=4, stages=3)
    for _ in range(2):  # the counters of arrived programs are 0 again
        got = fused.multiply(x, moved(weight, device), bias, config)
        want = x.double().cpu() @ values.T + bias.double().cpu()
        assert_near(got.cpu(), want, x.cpu(), values)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_a_program_takes_are_multiplied_by_the_kernel(kind):
    weight, values = drawn("64", 40, 128)
    x, _, device = operands(kind, 300, 40, 256)
    rows = x[:, :128]  # not one after the other
    got = fused.linear(rows, moved(weight, device)).cpu()
    assert_near(got, rows.double().cpu() @ values.T, rows.cpu(), values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, ROUNDED])
def test_decoded_outputs_are_the_rounded_values(kind, stored, dtype):
    weight, _ = drawn(stored, 200, 192)
    out = torch.full((150, 192), torch.nan, device=kind[0], dtype=dtype)
    fused.decode(moved(weight, kind[0]), 37, out)
    values = weight.floats()
    if weight.order is not None:
        values = values[:, weight.order]
    assert torch.equal(out.cpu(), values[37:187].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["64", "act-order"])
def test_many_tokens_are_multiplied_by_decoded_outputs(kind, stored, monkeypatch):
    monkeypatch.setattr(fused, "DECODED_FROM", 7)
    monkeypatch.setattr(fused, "_DECODED_BYTES", 30 * 128 * 4)  # outputs in several pieces
    weight, values = drawn(stored, 70, 128)
    x, bias, device = operands(kind, 7, 70, 128)
    got = fused.linear(x, moved(weight, device), bias).cpu()
    want = x.double().cpu() @ values.T + bias.double().cpu()
    eps = torch.finfo(kind[1]).eps  # of each value, of the product and of its sum with the bias
    bound = 2 * eps * (x.double().cpu().abs() @ values.abs().T + bias.double().cpu().abs())
    assert ((got.double() - want).abs() <= bound + 128 * torch.finfo(torch.float32).eps).all()


def test_half_bytes_become_the_last_bits_of_numbers_of_16_bits():
    halves = torch.arange(16)
    for dtype, ones in fused._ONES.items():
        numbers = (halves | ones).short().view(dtype)
        assert torch.equal(numbers.long(), halves + fused._OFFSETS[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_and_the_reference_agree(kind):
    weight, values = drawn("64", 96, 128)
    x, bias, device = operands(kind, 9, 96, 128)
    want = reference.linear(x.cpu(), weight, bias.cpu())
    assert_near(fused.linear(x, moved(weight, device), bias).cpu(), want.double(), x.cpu(), values)
