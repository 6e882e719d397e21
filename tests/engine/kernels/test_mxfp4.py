"""Experts in MXFP4: products of exactly the format's values, by torch on the CPU and by CUDA's
kernels.

Without a GPU the kernels run in Triton's interpreter.
"""

import re

import pytest
import torch

from lorikeet_engine.kernels import moe
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe import Clamp, ClampedBiases
from lorikeet_engine.kernels.moe.mxfp4 import BITS, LARGEST_SCALE, Mxfp4Experts, pack, part
from tests.engine.interpreter import INTERPRETED, KINDS, random, slow
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.test_moe import SPREADS, quantized_in_rows, spread_rows

reference = in_torch(moe)

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
CLAMP = Clamp(1.702, 1.5)


def drawn(experts, d_out, d_in, scales=(118, 126)):
    """Stored codes and scales, and their values in float64 by the format's definition."""
    generator = torch.Generator().manual_seed(d_out + d_in)
    codes = torch.randint(256, (experts, d_out, d_in // 2), generator=generator)
    exponents = torch.randint(*scales, (experts, d_out, d_in // 32), generator=generator)
    q = torch.stack([codes % 16, codes // 16], -1).flatten(2)
    values = LEVELS[q % 8] * (1 - 2 * (q // 8))
    values *= (2.0 ** (exponents.double() - 127)).repeat_interleave(32, -1)
    return codes.byte(), exponents.byte(), values


def packed(kind, *shape):
    codes, scales, values = drawn(*shape)
    return pack(codes.to(kind[0]), scales.to(kind[0])), values.to(kind[0])


def floats(weight):
    return torch.stack([weight.floats(expert) for expert in range(weight.shape[0])]).double()


def assert_near(got, x, values, routed, gathered):
    """Compare with the exact product: a rounding of each float32 sum, and one of the result."""
    given = (routed,), {"gathered": gathered}
    want = reference.expert_products(x.double(), values, *given[0], **given[1])
    sizes = reference.expert_products(x.double().abs(), values.abs(), *given[0], **given[1])
    lost = x.shape[1] * torch.finfo(torch.float32).eps * sizes
    assert ((got.double() - want).abs() <= torch.finfo(got.dtype).eps * want.abs() + lost).all()


@pytest.mark.parametrize("scales", [(118, 126), (0, 8), (120, LARGEST_SCALE + 1)])
@pytest.mark.parametrize(("d_out", "d_in"), [(1, 32), (7, 64), (5, 128), (33, 160), (4, 288)])
def test_a_packed_weight_has_the_exact_values_of_its_format(d_out, d_in, scales):
    codes, exponents, values = drawn(3, d_out, d_in, scales)
    weight = pack(codes, exponents)
    assert weight.shape == values.shape
    assert torch.equal(floats(weight), values)
    assert torch.equal(values.bfloat16().double(), values)


def test_a_packed_weight_takes_at_most_three_tenths_of_bfloat16s_bytes():
    weight, values = packed(("cpu", None), 2, 64, 2880)
    assert weight.nbytes == 2 * 64 * 23 * (64 + 4) <= 0.3 * 2 * values.numel()


def test_codes_have_bits_of_their_own():
    assert sorted(bit for places in BITS for bit in places) == list(range(16))


@pytest.mark.parametrize("scale", [LARGEST_SCALE + 1, 255])
def test_scales_that_cannot_be_packed_are_refused(scale):
    codes, scales, _ = drawn(2, 4, 64)
    scales[1, 3, 1] = scale
    with pytest.raises(ValueError, match=f"a scale of {scale}, above 128"):
        pack(codes, scales)


def test_some_outputs_and_inputs_of_a_weight_are_those_of_the_whole():
    codes, scales, values = drawn(2, 12, 160)
    rows = range(2, 8, 2), range(3, 8, 2)
    kept = pack(*part(codes, scales, rows, range(32, 128)))
    assert torch.equal(floats(kept), values[:, [2, 4, 6, 3, 5, 7], 32:128])


def test_inputs_that_share_a_scale_are_not_parted():
    with pytest.raises(ValueError, match="16 to 64 are no multiples of 32"):
        part(*drawn(2, 12, 160)[:2], [range(12)], range(16, 64))


@pytest.mark.parametrize("gathered", [False, True])
def test_the_reference_multiplies_the_exact_values(gathered):
    kind = ("cpu", torch.float32)
    routed, tokens, rows, experts = spread_rows(kind, "even")
    weight, values = packed(kind, experts, 40, 160)
    x = random(kind, tokens if gathered else rows, 160)
    got = reference.expert_products(x, weight, routed, gathered=gathered)
    assert_near(got, x, values, routed, gathered)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("d_out", "d_in"), [(48, 128), (33, 160), (80, 64)])
@pytest.mark.parametrize("spread", SPREADS)
def test_products(kind, d_out, d_in, spread, gathered):
    from lorikeet_engine.kernels.moe import fused

    routed, tokens, rows, experts = spread_rows(kind, spread)
    weight, values = packed(kind, experts, d_out, d_in)
    x = random(kind, tokens if gathered else rows, d_in)
    got = fused.expert_products(x, weight, routed, gathered=gathered)
    assert got.dtype == kind[1]
    assert_near(got, x, values, routed, gathered)


@pytest.mark.parametrize("kind", KINDS)
def test_products_with_the_smallest_and_largest_scales(kind):
    from lorikeet_engine.kernels.moe import grouped_mxfp4

    routed, _, rows, experts = spread_rows(kind, "even")
    for scales in ((0, 8), (LARGEST_SCALE - 3, LARGEST_SCALE + 1)):
        codes, exponents, values = drawn(experts, 40, 64, scales)
        weight = pack(codes.to(kind[0]), exponents.to(kind[0]))
        x = torch.zeros(rows, 64, device=kind[0], dtype=kind[1])
        x[:, 7] = 1.0  # the weight's own values
        got = grouped_mxfp4.products(x.float(), weight, routed)
        assert_near(got, x, values.to(kind[0]), routed, gathered=False)


@pytest.mark.parametrize("rows", [20, 100, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_tile(kind, rows):
    """Products of every TileConfig, for experts with full tiles, partial tiles and none."""
    from lorikeet_engine.kernels.moe import grouped_mxfp4

    logits = random(kind, rows, 3)
    logits[:, 2] -= 100
    routed = reference.route(logits, 1, normalised=True)
    weight, values = packed(kind, 3, 40, 96)
    x = random(kind, rows, 96)
    float32_on_gpu = kind == ("cuda", torch.float32)  # takes the first tiles alone
    for _, config in grouped_mxfp4.TILES[: 1 if float32_on_gpu else None]:
        got = grouped_mxfp4.products(x, weight, routed, config)
        assert_near(got, x, values, routed, gathered=False)


def test_tiles_are_as_high_as_an_experts_rows():
    pytest.importorskip("triton")
    from lorikeet_engine.kernels.moe import grouped_mxfp4

    rows = [grouped_mxfp4.tile_config(each * 32, 32).rows for each in (0.1, 8, 24, 48, 5000)]
    assert rows == sorted(rows)
    assert (rows[0], rows[-1]) == (16, 128)


def test_the_ptx_that_decodes_computes_what_triton_computes():
    """Run the instructions of the inline PTX on numbers, for every code in every place."""
    pytest.importorskip("triton")
    from lorikeet_engine.kernels.moe import grouped_mxfp4

    codes = torch.arange(16)
    for block, places in enumerate(BITS):
        words = sum((codes >> 3 - at & 1) << place for at, place in enumerate(places))
        others = 0xFFFF & ~sum(1 << place for place in places)
        for noise in (0, others):
            low, high = words | noise, words.flip(0) | noise
            for lane, got in enumerate(
                run_ptx(grouped_mxfp4._DECODE.value, low | high << 16)[block]
            ):
                want = codes if lane == 0 else codes.flip(0)
                assert torch.equal(got, (want >> 3 << 15) | (want & 7) << 6)


def run_ptx(source, words):
    """The bits of both numbers that each of the four products multiplies by a scale."""
    values, products = {"$4": words}, {}
    for line in source.strip(" {}\n").split(";"):
        name, *operands = re.split(r"[\s,]+", line.strip())
        if name in ("", ".reg", "mov.b32"):
            continue
        if name == "fma.rn.bf16x2":
            out, code, scale, zero = operands
            assert (scale, zero) == (f"${5 + 2 * int(out[1:])}", "zero")
            products[int(out[1:])] = (values[code] & 0xFFFF, values[code] >> 16 & 0xFFFF)
            continue
        one, other = (values[each] if each in values else int(each, 0) for each in operands[1:])
        values[operands[0]] = {
            "and.b32": lambda a, b: a & b,
            "or.b32": lambda a, b: a | b,
            "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
            "shr.b32": lambda a, b: a >> b,
        }[name](one, other)
    return products


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("first_rank", [True, False])
@pytest.mark.parametrize(
    ("experts", "per_token", "hidden", "width"),
    [(5, 1, 64, 96), (9, 3, 160, 32), *slow((32, 4, 288, 320))],
)
@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("stored", ["mxfp4", "floats", "fp8"])
def test_the_experts_of_one_token(
    kind, experts, per_token, hidden, width, stored, first_rank, adapted
):
    from lorikeet_engine.kernels.moe import fused

    x, logits = (random(kind, 1, size) for size in (hidden, experts))
    gate_up, up_values = packed(kind, experts, 2 * width, hidden)
    down, down_values = packed(kind, experts, hidden, width)
    if stored == "floats":
        gate_up, down = up_values.to(kind[1]), down_values.to(kind[1])
    if stored == "fp8":
        gate_up, down = (quantized_in_rows(each.float()) for each in (up_values, down_values))
        up_values, down_values = gate_up.floats().double(), down.floats().double()
    of_down = random(kind, experts, hidden) if first_rank else None
    biases = ClampedBiases(CLAMP, random(kind, experts, 2 * width), of_down)
    lora = None
    if adapted:
        one = torch.ones(1, dtype=torch.int32, device=kind[0])
        lora = LoraDelta(3 * random(kind, experts, 1).T.contiguous(), one)
    # the reference adds LoRA to its logits in place
    routed = reference.route(logits.clone(), per_token, lora, normalised=True)
    y = reference.expert_products(x.double(), up_values, routed, gathered=True)
    gated = reference.clamped_swiglu(y, biases.gate_up, routed, CLAMP)
    y = reference.expert_products(gated.double(), down_values, routed)
    want = reference.combine(y, routed, of_down)
    given = (x, gate_up, down, logits, lora, per_token)
    for _ in range(2):  # the counters of arrived programs are 0 again
        got = fused.experts_of_one(*given, normalised=True, gelu=False, biases=biases)
        size = (reference.expert_products(gated.abs().double(), down_values.abs(), routed)).max()
        atol = 8 * torch.finfo(kind[1]).eps * size.item()
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 32, 256, 2048])
@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize(("d_out", "gathered"), [(5760, True), (2880, False)])
def test_products_of_a_real_shape(tokens, experts, d_out, gathered):
    """Those of gpt-oss, alone and replayed from a graph on other tokens."""
    from lorikeet_engine.kernels.moe import fused

    assert not INTERPRETED
    kind, per_token = ("cuda", torch.bfloat16), 4
    codes = torch.randint(256, (experts, d_out, 1440), dtype=torch.uint8, device="cuda")
    scales = torch.randint(116, 124, (experts, d_out, 90), dtype=torch.uint8, device="cuda")
    weight = pack(codes, scales)
    values = torch.stack([weight.floats(expert).bfloat16() for expert in range(experts)])
    logits = random(kind, tokens, experts)
    x = random(kind, tokens if gathered else tokens * per_token, 2880)

    def products():
        routed = fused.route(logits, per_token, normalised=True)
        return fused.expert_products(x, weight, routed, gathered=gathered)

    def assert_right(got):
        routed = fused.route(logits, per_token, normalised=True)
        want = reference.expert_products(x, values, routed, gathered=gathered).float()
        # both are sums of the same exact products, rounded once
        off = (got.float() - want).abs().amax() / want.abs().amax()
        assert off <= 2 * torch.finfo(torch.bfloat16).eps

    assert_right(products())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = products()
    logits.normal_()
    x.normal_()
    got.fill_(torch.nan)
    graph.replay()
    assert_right(got)


def test_a_weight_without_values_has_the_shapes_of_one_with_them():
    codes, scales, _ = drawn(2, 12, 160)
    want, got = pack(codes, scales), pack(codes.to("meta"), scales.to("meta"))
    assert isinstance(got, Mxfp4Experts)
    assert (got.shape, got.nbytes) == (want.shape, want.nbytes)
    assert (got.words.shape, got.scales.shape) == (want.words.shape, want.scales.shape)
