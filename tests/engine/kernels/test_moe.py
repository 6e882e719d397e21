"""A mixture of experts: the routing's order, and the kernels equal torch's operators.

Without a GPU the kernels run in Triton's interpreter; the routing's cases run on the CPU, too.
"""

import pytest
import torch
from torch.nn import functional as F

from lorikeet_engine.kernels import moe
from lorikeet_engine.kernels.fp8 import DTYPE, Activations, Fp8Rows, quantize_rows, quantize_weight
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe import Clamp, Sigmoids, expert_products
from tests.engine.interpreter import INTERPRETED, KINDS, random, slow
from tests.engine.kernels.definitions import in_torch

reference = in_torch(moe)

# tokens, experts, per_token: also more experts than rows, and all experts of each token
ROUTES = [(1, 8, 2), (7, 3, 1), (5, 128, 8), (33, 6, 6), (130, 60, 4)]


def counts(routed):
    return routed.starts.diff().tolist()


def assert_near(got, want):
    """The sums are of float32, and rounded once; want is float64."""
    eps = 2 * torch.finfo(got.dtype).eps + 8 * torch.finfo(torch.float32).eps
    atol = eps * want.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize(("tokens", "experts", "per_token"), ROUTES)
def test_rows_are_sorted_by_expert_and_then_by_token(tokens, experts, per_token):
    logits = random(("cpu", torch.float32), tokens, experts)
    routed = reference.route(logits, per_token, normalised=False)
    probabilities, best = logits.softmax(-1).topk(per_token)
    torch.testing.assert_close(routed.weights, probabilities)
    chosen = best.flatten().tolist()
    want = sorted(range(len(chosen)), key=lambda pair: (chosen[pair], pair))
    assert routed.pairs.tolist() == want
    assert [want[row] for row in routed.rows.flatten()] == list(range(len(chosen)))
    assert counts(routed) == [chosen.count(expert) for expert in range(experts)]


def test_of_equally_likely_experts_the_first_are_chosen():
    routed = reference.route(torch.zeros(2, 5), 2, normalised=True)
    assert counts(routed) == [2, 2, 0, 0, 0]
    assert routed.weights.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "per_token"), ROUTES[:-1])
def test_route(kind, tokens, experts, per_token, adapters, normalised):
    assert_routed(kind, tokens, experts, per_token, adapters, normalised)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("adapters", "normalised"), [(True, True), *slow((False, False), (False, True), (True, False))]
)
def test_many_tokens_are_routed(kind, adapters, normalised):
    assert_routed(kind, *ROUTES[-1], adapters, normalised)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "per_token"), ROUTES[:-1])
def test_route_by_sigmoids(kind, tokens, experts, per_token, adapters, normalised):
    bias = random((kind[0], torch.float32), experts) / 4
    sigmoids = Sigmoids(bias, 2.5)
    assert_routed(kind, tokens, experts, per_token, adapters, normalised, sigmoids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("experts", "groups", "kept"), [(12, 4, 2), (24, 3, 1), (64, 8, 4), (8, 2, 2)]
)
def test_experts_are_chosen_from_the_kept_groups(kind, adapters, experts, groups, kept):
    bias = random((kind[0], torch.float32), experts) / 4
    sigmoids = Sigmoids(bias, 2.5, groups, kept)
    assert_routed(kind, 9 if INTERPRETED else 37, experts, 4, adapters, True, sigmoids)


def test_sigmoids_with_their_biases_choose_experts_and_alone_weigh_them():
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.3, 0.1, 0.2])
    routed = reference.route(logits, 2, normalised=False, sigmoids=Sigmoids(bias, 3.0))
    assert routed.experts.tolist() == [[1, 3]]
    assert routed.weights.tolist() == [[1.5, 1.5]]


def test_factors_multiply_the_weights_of_chosen_experts_and_choose_none():
    logits, factors = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([9.0, -0.5, 3.0])
    plain = reference.route(logits, 2, normalised=True)
    routed = reference.route(logits, 2, normalised=True, factors=factors)
    assert routed.experts.tolist() == plain.experts.tolist() == [[1, 2]]
    assert torch.equal(routed.weights, plain.weights * torch.tensor([-0.5, 3.0]))


def assert_routed(kind, tokens, experts, per_token, adapters, normalised, sigmoids=None):
    from lorikeet_engine.kernels.moe import fused

    logits, lora = random(kind, tokens, experts), None
    if adapters:
        some = torch.tensor([tokens // 2], dtype=torch.int32, device=kind[0])
        lora = LoraDelta(random(kind, experts, tokens).T.contiguous(), some)
    factors = random((kind[0], torch.float32), experts) if adapters else None
    given = {"normalised": normalised, "sigmoids": sigmoids, "factors": factors}
    got = fused.route(logits, per_token, lora, **given)
    want = reference.route(logits, per_token, lora, **given)
    torch.testing.assert_close(got.weights, want.weights)
    for name in ("pairs", "rows", "experts", "starts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("kind", KINDS)
def test_equal_and_nan_logits_choose_experts_within_bounds(kind):
    from lorikeet_engine.kernels.moe import fused

    logits = torch.zeros(3, 5, device=kind[0], dtype=kind[1])
    logits[1] = float("nan")
    routed = fused.route(logits, 2, normalised=True)
    assert counts(routed)[:2] == [2, 2]
    assert sorted(routed.pairs.tolist()) == list(range(6))


def spread_rows(kind, spread):
    """A routing; how many rows are its tokens' and its pairs', and how many experts it has."""
    tokens, experts = (3, 40) if spread == "more experts than rows" else (45, 4)
    logits = random(kind, tokens, experts)
    if spread == "one expert has all":
        logits[:, 1] += 100
    per_token = 1 if spread == "one expert has all" else 2
    routed = reference.route(logits, per_token, normalised=True)
    return routed, tokens, tokens * per_token, experts


SPREADS = ["even", "one expert has all", "more experts than rows"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("d_out", "d_in"), [(48, 64), (33, 100)])
@pytest.mark.parametrize("spread", SPREADS)
def test_products(kind, d_out, d_in, spread, gathered):
    from lorikeet_engine.kernels.moe import fused

    routed, tokens, rows, experts = spread_rows(kind, spread)
    x = random(kind, tokens if gathered else rows, d_in)
    weight = random(kind, experts, d_out, d_in)
    got = fused.expert_products(x, weight, routed, gathered=gathered)
    want = reference.expert_products(x.double(), weight.double(), routed, gathered=gathered)
    assert_near(got, want)


@pytest.mark.parametrize("rows", [20, 100, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_tile(kind, rows):
    """Products of every TileConfig, for experts with full tiles, partial tiles and none."""
    from lorikeet_engine.kernels.moe import grouped

    logits = random(kind, rows, 3)
    logits[:, 2] -= 100
    routed = reference.route(logits, 1, normalised=True)
    x, weight = random(kind, rows, 48), random(kind, 3, 40, 48)
    want = reference.expert_products(x.double(), weight.double(), routed)
    for config in (grouped.FEW, grouped.SOME, grouped.MANY, grouped.MOST):
        got = grouped.products(x, weight, routed, config)
        assert_near(got, want)


def random_fp8(kind, experts, d_out, d_in):
    """Weights of experts with scales of very different sizes."""
    sizes = 4.0 ** random(kind, experts, d_out, 1)
    return quantized_in_rows(random(kind, experts, d_out, d_in) * sizes)


def quantized_in_rows(weight):
    rounded = quantize_weight(weight.flatten(0, 1))
    return Fp8Rows(rounded.rows.view(weight.shape), rounded.scales.view(weight.shape[:2]))


def quantized_in_blocks(weight, height=16, width=96):
    """Scales of blocks, independent of one another."""
    sides = [-(-side // size) for side, size in zip(weight.shape[1:], (height, width), strict=True)]
    scales = 4.0 ** random((weight.device, torch.float32), len(weight), *sides) / 400
    of = Fp8Rows(torch.ones_like(weight, dtype=DTYPE), scales, (height, width)).floats()
    return Fp8Rows((weight / of).clamp(-448, 448).to(DTYPE), scales, (height, width))


def rounded_rows(x):
    """Round on the CPU: on CUDA torch does not divide exactly."""
    rounded = quantize_rows(x.cpu())
    return Fp8Rows(rounded.rows.to(x.device), rounded.scales.to(x.device))


def assert_fp8_products(got, rounded, weight, routed, gathered):
    """They are the products of the numbers that FP8 stands for, here in float64.

    Compared without their scales, since what small ones are added up of is not. A sum in tensor
    cores loses up to a 2^13th of itself with each 32 products, on a GPU, and with those begun.
    """
    numbers = [rounded.rows.double(), weight.rows.double()]
    want = reference.expert_products(*numbers, routed, gathered=gathered)
    expert = torch.arange(len(weight.rows), device=got.device).repeat_interleave(
        routed.starts.diff()
    )
    of = routed.pairs // routed.per_token if gathered else slice(None)
    scales = rounded.scales[of][:, None].double() * weight.scales[expert].double()
    lost = 0.0 if got.device.type == "cpu" else -(-rounded.rows.shape[1] // 32) * 2.0**-13
    eps = lost + torch.finfo(got.dtype).eps + 8 * torch.finfo(torch.float32).eps
    assert (got.double() / scales - want).abs().max() <= eps * want.abs().max()


def test_fp8_products_multiply_the_rounded_numbers():
    kind = ("cpu", torch.float32)
    routed, tokens, rows, experts = spread_rows(kind, "even")
    weight = random_fp8(kind, experts, 33, 100)
    for gathered, count in ((True, tokens), (False, rows)):
        x = random(kind, count, 100)
        rounded = quantize_rows(x)
        unread = Activations(torch.full_like(x, torch.nan), rounded)
        for inputs in (x, unread):
            got = expert_products(inputs, weight, routed, gathered=gathered)
            assert_fp8_products(got, rounded, weight, routed, gathered)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("given", ["rounded", "floats"])
@pytest.mark.parametrize(("d_out", "d_in"), [(48, 64), (33, 100), (80, 300)])
@pytest.mark.parametrize("spread", SPREADS)
def test_fp8_products(kind, d_out, d_in, spread, given, gathered):
    from lorikeet_engine.kernels.moe import fused

    routed, tokens, rows, experts = spread_rows(kind, spread)
    x = random(kind, tokens if gathered else rows, d_in)
    rounded, weight = rounded_rows(x), random_fp8(kind, experts, d_out, d_in)
    unread = Activations(torch.full_like(x, torch.nan), rounded)
    inputs = unread if given == "rounded" else x
    got = fused.expert_products(inputs, weight, routed, gathered=gathered)
    assert got.dtype == kind[1]
    assert_fp8_products(got, rounded, weight, routed, gathered)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spread", "block", "d_out", "d_in", "gathered"), [
    ("even", (16, 96), 80, 304, True),
    ("even", (16, 96), 80, 304, False),
    ("one expert has all", (11, 32), 33, 112, False),  # narrow, as a cut leaves them
    ("more experts than rows", (24, 64), 72, 160, True),
])  # fmt: skip
def test_fp8_products_of_numbers_whose_blocks_have_scales(
    kind, spread, block, d_out, d_in, gathered
):
    from lorikeet_engine.kernels.moe import fused

    routed, tokens, rows, experts = spread_rows(kind, spread)
    x = random(kind, tokens if gathered else rows, d_in)
    rounded = rounded_rows(x)
    weight = quantized_in_blocks(random(kind, experts, d_out, d_in), *block)
    got = fused.expert_products(Activations(x, rounded), weight, routed, gathered=gathered)
    floats = [each.floats().double() for each in (rounded, weight)]
    want = reference.expert_products(*floats, routed, gathered=gathered)
    lost = 0.0 if got.device.type == "cpu" else -(-d_in // 32) * 2.0**-13
    eps = lost + torch.finfo(got.dtype).eps + 8 * torch.finfo(torch.float32).eps
    assert ((got.double() - want).abs() <= eps * want.abs().amax(1, keepdim=True)).all()


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("rows", [20, 100, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_products_of_every_tile(kind, rows):
    """Products of every TileConfig, for experts with full tiles, partial tiles and none."""
    from lorikeet_engine.kernels.moe import grouped_fp8

    logits = random(kind, rows, 3)
    logits[:, 2] -= 100
    routed = reference.route(logits, 1, normalised=True)
    x, weight = quantize_rows(random(kind, rows, 48)), random_fp8(kind, 3, 40, 48)
    for _, config in grouped_fp8.TILES:
        got = grouped_fp8.products(x, weight, routed, kind[1], config)
        assert_fp8_products(got, x, weight, routed, gathered=False)


def test_fp8_tiles_are_as_high_as_an_experts_rows():
    pytest.importorskip("triton")
    from lorikeet_engine.kernels.moe import grouped_fp8

    rows = [grouped_fp8.tile_config(count * 128, 128).rows for count in (0.1, 8, 9, 32, 96, 5000)]
    assert rows == [16, 16, 32, 32, 64, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 32, 256, 2048])
@pytest.mark.parametrize(("d_out", "d_in", "gathered"), [(1536, 2048, True), (2048, 768, False)])
def test_fp8_products_of_a_real_shape(tokens, d_out, d_in, gathered):
    """Qwen3-30B-A3B's, alone and replayed from a graph on other tokens."""
    from lorikeet_engine.kernels.moe import fused

    kind, experts, per_token = ("cuda", torch.bfloat16), 128, 8
    weight = random_fp8(kind, experts, d_out, d_in)
    logits = random(kind, tokens, experts)
    x = random(kind, tokens if gathered else tokens * per_token, d_in)

    def products():
        routed = fused.route(logits, per_token, normalised=True)
        return fused.expert_products(x, weight, routed, gathered=gathered)

    def assert_right(got):
        routed = fused.route(logits, per_token, normalised=True)
        assert_fp8_products(got, rounded_rows(x), weight, routed, gathered)

    assert_right(products())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = products()
    logits.normal_()
    x.normal_()
    got.fill_(torch.nan)
    graph.replay()
    assert_right(got)


@pytest.mark.gpu
def test_products_of_a_prefill():
    from lorikeet_engine.kernels.moe import fused, grouped

    kind = ("cuda", torch.bfloat16)
    tokens = 4 * grouped.TORCHS_GATHERED_ROWS
    routed = reference.route(random(kind, tokens, 4), 1, normalised=True)
    x, weight = random(kind, tokens, 256), random(kind, 4, 128, 256)
    assert grouped.is_torchs_better(x, weight, tokens, gathered=True)
    got = fused.expert_products(x, weight, routed, gathered=True)
    want = grouped.products(x, weight, routed, gathered=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0.25)


@pytest.mark.parametrize(
    ("d_out", "d_in", "taken"), [(48, 64, True), (48, 36, False), (36, 64, False)]
)
def test_torchs_product_is_given_no_sides_that_it_refuses_or_pads(d_out, d_in, taken, monkeypatch):
    pytest.importorskip("triton")
    from lorikeet_engine.kernels.moe import grouped

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    experts, rows = 4, 4 * grouped.TORCHS_ROWS
    x, weight = (
        torch.zeros(size, dtype=torch.bfloat16) for size in ((1, d_in), (experts, d_out, d_in))
    )
    assert grouped.is_torchs_better(x, weight, rows, gathered=False) == taken
    if taken:
        ends = torch.arange(1, experts + 1, dtype=torch.int32)
        y = torch._grouped_mm(x.expand(experts, -1).contiguous(), weight.mT, offs=ends)
        assert y.is_contiguous()


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["floats", "fp8"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("experts", "per_token", "hidden", "width"), [(5, 1, 64, 48), (9, 3, 100, 33), (16, 8, 48, 20)]
)
def test_the_experts_of_one_token(kind, experts, per_token, hidden, width, stored, adapted):
    assert_one_token(kind, experts, per_token, hidden, width, stored, adapted)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("per_token", "stored", "adapted"),
    [
        (2, "fp8", True),
        (2, "floats", False),
        *slow(*((8, stored, adapted) for stored in ("floats", "fp8") for adapted in (False, True))),
    ],
)
def test_the_experts_of_one_token_that_are_wider_than_a_block(kind, per_token, stored, adapted):
    assert_one_token(kind, 16, per_token, 20 if INTERPRETED else 48, 300, stored, adapted)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
def test_the_experts_of_one_token_whose_blocks_have_scales(kind):
    assert_one_token(kind, 9, 3, 112, 32, "blocks", adapted=False)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_their_scales_in_every_step_over_columns(kind, monkeypatch):
    from lorikeet_engine.kernels.gemv import GemvConfig
    from lorikeet_engine.kernels.moe import one_token

    monkeypatch.setattr(one_token, "GATE_UP", GemvConfig(4, 64, 4, summed=8))
    x, weight = random(kind, 1, 304), quantized_in_blocks(random(kind, 3, 64, 304) / 16)
    chosen = torch.tensor([[2, 0]], dtype=torch.int32, device=kind[0])
    got = one_token.gate_up_of(x, weight, chosen, gelu=False)
    y = weight.floats().double()[chosen[0].long()] @ x[0].double()
    want = F.silu(y[:, :32]) * y[:, 32:]
    atol = 8 * torch.finfo(kind[1]).eps * max(1.0, y.abs().max().item() ** 2)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["floats", "fp8"])
@pytest.mark.parametrize(
    ("experts", "per_token", "hidden", "width"), [(5, 1, 64, 48), (9, 3, 100, 33), (16, 8, 48, 20)]
)
def test_the_experts_of_one_token_without_gates(kind, experts, per_token, hidden, width, stored):
    from lorikeet_engine.kernels.moe import fused

    x, logits = (random(kind, 1, size) for size in (hidden, experts))
    up = random(kind, experts, width, hidden) * hidden**-0.5
    down = random(kind, experts, hidden, width) * width**-0.5
    sigmoids = Sigmoids(random((kind[0], torch.float32), experts) / 4, 2.5)
    floats = up.double(), down.double()
    if stored == "fp8":
        up, down = quantized_in_rows(up), quantized_in_rows(down)
        floats = [each.floats().double() for each in (up, down)]
    got = fused.experts_of_one(
        x, up, down, logits, None, per_token,
        normalised=True, gelu=False, sigmoids=sigmoids, squared_relu=True,
    )  # fmt: skip
    routed = reference.route(logits, per_token, normalised=True, sigmoids=sigmoids)
    y = reference.expert_products(x.double(), floats[0], routed, gathered=True)
    y = y.clamp(min=0).square()
    want = reference.combine(reference.expert_products(y, floats[1], routed), routed)
    atol = 6 * 2.5 * torch.finfo(kind[1]).eps * y.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


def assert_one_token(kind, experts, per_token, hidden, width, stored, adapted):
    from lorikeet_engine.kernels.moe import fused

    (x, logits), lora = (random(kind, 1, size) for size in (hidden, experts)), None
    gate_up = random(kind, experts, 2 * width, hidden) * hidden**-0.5
    down = random(kind, experts, hidden, width) * width**-0.5
    if adapted:
        one = torch.ones(1, dtype=torch.int32, device=kind[0])
        lora = LoraDelta(3 * random(kind, experts, 1).T.contiguous(), one)
    floats = gate_up.double(), down.double()
    if stored != "floats":
        quantize = quantized_in_blocks if stored == "blocks" else quantized_in_rows
        gate_up, down = quantize(gate_up), quantize(down)
        floats = [each.floats().double() for each in (gate_up, down)]
    given = (x, gate_up, down, logits, lora, per_token)
    got = fused.experts_of_one(*given, normalised=True, gelu=False)
    routed = reference.route(logits, per_token, lora, normalised=True)
    gated = reference.expert_products(x.double(), floats[0], routed, gathered=True)
    gated = F.silu(gated[:, :width]) * gated[:, width:]
    want = reference.combine(reference.expert_products(gated, floats[1], routed), routed)
    atol = 6 * torch.finfo(kind[1]).eps * gated.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 1500])
def test_combine(kind, width):
    from lorikeet_engine.kernels.moe import fused

    routed = reference.route(random(kind, 7, 9), 3, normalised=True)
    y = random(kind, 21, width)
    eps = torch.finfo(kind[1]).eps
    got, want = fused.combine(y, routed), reference.combine(y, routed)
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 1500])
def test_combine_adds_the_biases_of_each_rows_expert(kind, width):
    from lorikeet_engine.kernels.moe import fused

    routed = reference.route(random(kind, 7, 9), 3, normalised=True)
    y, biases = random(kind, 21, width), random(kind, 9, width)
    eps = torch.finfo(kind[1]).eps
    got = fused.combine(y, routed, biases)
    torch.testing.assert_close(
        got, reference.combine(y, routed, biases), rtol=4 * eps, atol=4 * eps
    )
    pairs = [(token, j) for token in range(7) for j in range(3)]
    want = torch.zeros(7, width, dtype=torch.float64)
    for token, j in pairs:
        output = y[routed.rows[token, j]].double() + biases[routed.experts[token, j]].double()
        want[token] += routed.weights[token, j].double().cpu() * output.cpu()
    torch.testing.assert_close(got.cpu().double(), want, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 1500])
def test_gates_and_values_of_experts_are_clamped(kind, width):
    from lorikeet_engine.kernels.moe import fused

    routed, clamp = reference.route(random(kind, 7, 9), 3, normalised=True), Clamp(1.702, 0.8)
    gate_up, biases = random(kind, 21, 2 * width), random(kind, 9, 2 * width)
    y = gate_up.double() + biases.double()[routed.experts.flatten()[routed.pairs.long()].long()]
    gates, values = y[:, :width].clamp(max=0.8), y[:, width:].clamp(-0.8, 0.8)
    want = (values + 1) * gates * torch.sigmoid(1.702 * gates)
    assert want.min() < -0.1, "gates are not clamped from below"
    for operators in (fused, reference):
        assert_near(operators.clamped_swiglu(gate_up, biases, routed, clamp), want)
