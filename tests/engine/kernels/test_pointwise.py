"""The fused pointwise kernels equal torch's; without a GPU they run in Triton's interpreter."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from lorikeet_engine.kernels import pointwise
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import QkNorm, fused
from tests.engine.interpreter import KINDS, random
from tests.engine.kernels.definitions import in_torch

reference = in_torch(pointwise)

sizes = pytest.mark.parametrize("tokens", [1, 7])


def assert_equal(got, want):
    """Both round their result once; what comes before is float32 or rounded once more."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 100, 1536])
def test_add_rms_norm(kind, width, tokens):
    x, delta = random(kind, tokens, width), random(kind, width, tokens).T.contiguous()
    weight, summed = random(kind, width), x.clone()
    want = reference.add_rms_norm(summed, delta, weight, 1e-5)
    assert_equal(fused.add_rms_norm(x, delta, weight, 1e-5), want)
    assert torch.equal(x, summed)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("width", [60, 1536])
def test_the_delta_is_normed_before_it_is_added(kind, width, adapters, tokens):
    x, delta = random(kind, tokens + 1, width), random(kind, width, tokens + 1).T.contiguous()
    weight, delta_weight = random(kind, width), random(kind, width + 2)[2:]
    lora, summed = adapted(kind, delta) if adapters else (None, delta.float())
    eps = 1e-5
    rounded = summed.to(kind[1]).float()
    normed = rounded / (rounded.square().mean(-1, keepdim=True) + eps).sqrt()
    wide = x.float() + 2.0 * (normed * delta_weight.float()).to(kind[1]).float()

    for operators in (reference, fused):
        changed = x.clone()
        same = operators.add_rms_norm(changed, delta.clone(), None, eps, lora, 2.0, delta_weight)
        assert same is changed
        assert_close(changed, wide)
        changed = x.clone()
        y = operators.add_rms_norm(changed, delta.clone(), weight, eps, lora, 2.0, delta_weight)
        assert torch.equal(changed, same)
        assert_close(y, reference.add_rms_norm(same.clone(), torch.zeros_like(x), weight, eps))


@pytest.mark.parametrize("kind", KINDS)
def test_a_norms_weight_may_be_float32_for_16_bit_hidden_states(kind):
    """1 + 2⁻¹⁰ is no bfloat16: rounded, it would make results too small by 2⁻¹⁰ on average."""
    fine = torch.full((1536,), 1 + 2**-10, device=kind[0])
    x, delta = random(kind, 3, 1536), random(kind, 1536, 3).T.contiguous()
    for operators in (fused, reference):
        changed = x.clone()
        y = operators.add_rms_norm(changed, delta, fine, 1e-5, None, 1.0, fine)
        for got, given in ((y, changed), ((changed - x), delta)):
            normed = given.double() / (given.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
            assert abs((got.double() * normed).sum() / normed.square().sum() - fine[0]) < 2**-12


@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_the_delta_is_multiplied_before_it_is_added(kind, tokens):
    x, delta, weight = (random(kind, tokens + 1, 60) for _ in range(3))
    lora, summed = adapted(kind, delta)
    wide, scale = x.float() + 0.22 * summed, 0.22
    y = fused.add_rms_norm(x, delta, weight[0], 1e-5, lora, scale)
    assert_close(x, wide)
    want = reference.add_rms_norm(x.float(), torch.zeros_like(wide), weight[0].float(), 1e-5)
    assert_close(y, want)
    by_reference, changed = random(kind, tokens + 1, 60), random(kind, tokens + 1, 60)
    assert_close(reference.add_rms_norm(by_reference, changed, weight[0], 1e-5, lora, scale), y)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(1, 1, 16, 16), (10, 2, 128, 128), (6, 3, 96, 96), (3, 2, 128, 96), (5, 1, 96, 24),
     (3, 1, 32, 0)],
)  # fmt: skip
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_and_store_kv(kind, heads, kv_heads, dim, rotary_dim, interleaved, tokens):
    qkv = random(kind, tokens, heads + 2 * kv_heads, dim)
    angles = random((kind[0], torch.float32), tokens, rotary_dim // 2)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:tokens].to(kind[0])
    kv = random(kind, 2, 3, 16, kv_heads, dim + 32 * (dim == 96))  # wider than heads
    turned, filled = qkv.clone(), kv.clone()
    at = angles.cos(), angles.sin()
    fused.rotary_and_store_kv(turned, *at, filled, slots, interleaved=interleaved)
    reference.rotary_and_store_kv(qkv, *at, kv, slots, interleaved=interleaved)
    assert_equal(turned[:, :heads], qkv[:, :heads])
    assert_equal(filled, kv)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(128, 128), (96, 24), (32, 0)])
def test_queries_alone_are_multiplied_by_their_tokens_gains(kind, dim, rotary_dim, tokens):
    heads, kv_heads = 10, 3
    qkv = random(kind, tokens, heads + 2 * kv_heads, dim)
    angles = random((kind[0], torch.float32), tokens, rotary_dim // 2)
    gain = 1 + torch.arange(tokens, dtype=torch.float32, device=kind[0]) / 7
    slots = torch.arange(tokens, device=kind[0])
    plain, plain_kv = qkv.clone(), random(kind, 2, 3, 16, kv_heads, dim)
    kv = plain_kv.clone()
    reference.rotary_and_store_kv(plain, angles.cos(), angles.sin(), plain_kv, slots)
    want = (plain[:, :heads].float() * gain[:, None, None]).to(qkv.dtype)
    for operators in (fused, reference):
        got, got_kv = qkv.clone(), kv.clone()
        at = angles.cos(), angles.sin()
        operators.rotary_and_store_kv(got, *at, got_kv, slots, query_gain=gain)
        assert_equal(got[:, :heads], want)
        assert_equal(got_kv, plain_kv)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_a_place_is_not_stored(kind):
    kv = random(kind, 2, 2, 16, 2, 16)
    before = kv.clone()
    angles = torch.zeros(3, 8, device=kind[0])
    slots = torch.full((3,), -1, device=kind[0])
    fused.rotary_and_store_kv(random(kind, 3, 8, 16), angles.cos(), angles.sin(), kv, slots)
    assert torch.equal(kv, before)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [8, 1500])
@pytest.mark.parametrize("gelu", [False, True])
def test_act_and_mul(kind, gelu, width, tokens):
    x = random(kind, tokens, 2 * width)
    assert_equal(fused.act_and_mul(x, gelu=gelu), reference.act_and_mul(x, gelu=gelu))


def adapted(kind, y):
    """LoRA of the first rows of y, NaN in the others; and y with LoRA, in float32."""
    count = len(y) // 2 + 1
    rows, summed = random(kind, *y.flatten(1).shape[::-1]).T.contiguous(), y.float().clone()
    summed[:count] += rows[:count].view_as(y[:count])
    rows[count:] = torch.nan
    return LoraDelta(rows, torch.tensor([count], dtype=torch.int32, device=kind[0])), summed


def assert_close(got, want):
    """The sum is rounded at most once more on its way."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=8 * eps, atol=8 * eps)


@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_lora_is_added_before_anything_else(kind, tokens):
    x = random(kind, tokens, 2 * 60)
    lora, summed = adapted(kind, x)
    assert_close(fused.act_and_mul(x, lora), reference.act_and_mul(summed))

    x, delta, weight = random(kind, tokens, 60), random(kind, 60, tokens).T, random(kind, 60)
    lora, summed = adapted(kind, delta.contiguous())
    want = reference.add_rms_norm(x.float().clone(), summed, weight.float(), 1e-5)
    assert_close(fused.add_rms_norm(x, delta.contiguous(), weight, 1e-5, lora), want)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_shared_expert_is_weighed_and_added(kind, adapters, tokens):
    y, x = random(kind, tokens, 1500), random(kind, 1500, tokens).T.contiguous()
    weights, lora, lora_of_weights = random(kind, tokens, 1), None, None
    summed, weighed = x.float(), weights.float()
    if adapters:
        (lora, summed), (lora_of_weights, weighed) = adapted(kind, x), adapted(kind, weights)
    want = y.float() + torch.sigmoid(weighed) * summed
    for operators in (fused, reference):
        changed = y.clone()
        operators.add_weighed(changed, x.clone(), lora, weights.clone(), lora_of_weights)
        assert_close(changed, want)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [8, 1500])
def test_lora_is_added_only_to_rows_with_an_adapter(kind, width, tokens):
    y = random(kind, tokens, width)
    lora, summed = adapted(kind, y)
    fused.add_delta(y, lora)
    assert_equal(y, summed.to(y.dtype))


@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_lora_is_added_to_queries_keys_and_values(kind, tokens):
    qkv, kv = random(kind, tokens, 4, 16), random(kind, 2, 3, 16, 1, 16)
    lora, summed = adapted(kind, qkv)
    angles = random((kind[0], torch.float32), tokens, 8)
    slots = torch.arange(tokens, device=kind[0])
    wide = kv.float().clone()
    fused.rotary_and_store_kv(qkv, angles.cos(), angles.sin(), kv, slots, lora)
    reference.rotary_and_store_kv(summed, angles.cos(), angles.sin(), wide, slots)
    assert_close(qkv[:, :2], summed[:, :2])
    assert_close(kv, wide)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [60, 1536])
def test_rms_norm(kind, width, tokens):
    x, weight = random(kind, tokens, width), random((kind[0], torch.float32), width)
    wide = x.double()
    want = 0.3 * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for operators in (reference, fused):
        assert_close(operators.rms_norm(x, weight, 1e-5, 0.3), want.float())
        assert_close(operators.rms_norm(x, weight, 1e-5), want.float() / 0.3)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta_weight", [False, True])
def test_hidden_states_are_multiplied_after_the_delta_is_added(kind, delta_weight, tokens):
    x, delta, weight = (random(kind, tokens + 1, 60) for _ in range(3))
    lora, _ = adapted(kind, delta)
    own = weight[1] if delta_weight else None
    added = x.clone()
    reference.add_rms_norm(added, delta.clone(), None, 1e-5, lora, 1.0, own)
    for operators in (reference, fused):
        changed = x.clone()
        given = (delta.clone(), weight[0], 1e-5, lora, 1.0, own, None, 0.7)
        y = operators.add_rms_norm(changed, *given)
        assert_close(changed, 0.7 * added.float())
        same = torch.zeros_like(x)
        assert_close(y, reference.add_rms_norm(changed.clone(), same, weight[0], 1e-5))


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("keys_are_values", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"), [(10, 2, 128, 32), (6, 3, 96, 24), (2, 1, 512, 128)]
)
def test_values_are_normed_without_a_weight_and_may_be_keys(
    kind, heads, kv_heads, dim, rotary_dim, keys_are_values, adapters, tokens
):
    qkv = random(kind, tokens, heads + (1 if keys_are_values else 2) * kv_heads, dim)
    lora, summed = adapted(kind, qkv) if adapters else (None, qkv.float())
    norm = QkNorm(random(kind, dim), random(kind, dim), 1e-5, values=True)
    angles = random((kind[0], torch.float32), tokens, rotary_dim // 2)
    at = angles.cos(), angles.sin()
    slots = torch.arange(tokens, device=kind[0])
    kv = random(kind, 2, 3, 16, kv_heads, dim)

    wide = summed.to(kind[1]).float()
    values = wide[:, -kv_heads:]
    want_values = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    weights = torch.stack([norm.query_weight] * heads + [norm.key_weight] * kv_heads).float()
    turned = wide[:, : heads + kv_heads]
    turned = weights * turned / (turned.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    turned = turned.to(kind[1]).float()
    cos = torch.ones(tokens, 1, dim // 2, device=kind[0])
    sin = torch.zeros_like(cos)
    cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2] = at[0][:, None], at[1][:, None]
    a, b = turned.chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for operators in (reference, fused):
        got, got_kv = qkv.clone(), kv.clone()
        operators.rotary_and_store_kv(
            got, *at, got_kv, slots, lora, norm, spans_head=True, keys_are_values=keys_are_values
        )
        assert_close(got[:, :heads], turned[:, :heads])
        stored = got_kv.flatten(1, 2)[:, :tokens]
        assert_close(stored[0], turned[:, heads:])
        assert_close(stored[1], want_values)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "rotary_dim"), [(10, 128, 32), (6, 96, 24), (1, 512, 512), (3, 32, 0)]
)
def test_queries_alone_turn_as_they_do_beside_keys(
    kind, heads, dim, rotary_dim, normed, adapters, tokens
):
    qkv = random(kind, tokens, heads + 4, dim)
    count = torch.tensor([tokens // 2 + 1], dtype=torch.int32, device=kind[0])
    both = LoraDelta(random(kind, tokens, (heads + 4) * dim), count)
    alone = LoraDelta(both.rows[:, : heads * dim].contiguous(), both.tokens)
    lora, lora_alone = (both, alone) if adapters else (None, None)
    norm = QkNorm(random(kind, dim), random(kind, dim), 1e-5, values=True) if normed else None
    angles = random((kind[0], torch.float32), tokens, rotary_dim // 2)
    at, slots = (angles.cos(), angles.sin()), torch.arange(tokens, device=kind[0])
    kv = random(kind, 2, 3, 16, 2, dim)
    for operators in (reference, fused):
        want, got = qkv.clone(), qkv[:, :heads].clone()
        operators.rotary_and_store_kv(want, *at, kv, slots, lora, norm, spans_head=True)
        operators.rotary_and_store_kv(got, *at, None, slots, lora_alone, norm, spans_head=True)
        assert torch.equal(got, want[:, :heads])


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(10, 2, 128, 128), (6, 3, 96, 48), (5, 1, 64, 64), (2, 1, 32, 0)],
)
def test_queries_and_keys_are_normed_before_they_turn(
    kind, heads, kv_heads, dim, rotary_dim, whole, adapters, tokens
):
    qkv = random(kind, tokens + 1, heads + 2 * kv_heads, dim)
    lora, summed = adapted(kind, qkv) if adapters else (None, qkv.float())
    widths = (heads * dim, kv_heads * dim) if whole else (dim, dim)
    norm = QkNorm(random(kind, widths[0]), random(kind, widths[1] + 2)[2:], 1e-5)
    angles = random((kind[0], torch.float32), tokens + 1, rotary_dim // 2)
    slots = torch.arange(tokens + 1, device=kind[0])
    slots[0] = -1  # a padded row
    kv = random(kind, 2, 3, 16, kv_heads, dim)

    wide, wide_kv = summed.to(kind[1]).float(), kv.float()
    for part, weight in ((slice(heads), norm.query_weight), (slice(heads, -kv_heads), None)):
        x = wide[:, part]
        weight = (norm.key_weight if weight is None else weight).float().view(-1, dim)
        over = (-2, -1) if whole else -1
        x *= weight / (x.square().mean(over, keepdim=True) + 1e-5).sqrt()
    wide = wide.to(kind[1]).float()
    reference.rotary_and_store_kv(wide, angles.cos(), angles.sin(), wide_kv, slots)

    by_reference, reference_kv = qkv.clone(), kv.clone()
    reference.rotary_and_store_kv(
        by_reference, angles.cos(), angles.sin(), reference_kv, slots, lora, norm
    )
    fused.rotary_and_store_kv(qkv, angles.cos(), angles.sin(), kv, slots, lora, norm)
    for turned, filled in ((qkv, kv), (by_reference, reference_kv)):
        assert_close(turned[:, :heads], wide[:, :heads])
        assert_close(filled, wide_kv)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (6, 128), (5, 96), (33, 64)])
def test_gates_of_heads(kind, heads, dim, sigmoid, adapters, tokens):
    x, weight = random(kind, tokens, heads, dim), random((kind[0], torch.float32), dim)
    product = random(kind, tokens, heads, 2 * dim)  # of which each head has a gate behind
    lora, summed = adapted(kind, product) if adapters else (None, product.float())
    gate, open_ = product[..., dim:], summed[..., dim:].sigmoid()
    if lora is not None:
        lora = LoraDelta(lora.rows.view_as(product)[..., dim:], lora.tokens)
    want = x.float() * open_
    if not sigmoid:
        scale = (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        want *= summed[..., dim:] / scale * weight
    for operators in (fused, reference):
        if sigmoid:
            y = operators.sigmoid_gate(x, gate, lora)
        else:
            y = operators.gated_rms_norm(x, gate, weight, 1e-6, lora)
        assert y.dtype == kind[1]
        assert_close(y, want)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(4, 24), (1, 1500)])
def test_groups_are_gated_and_then_normed(kind, groups, width, adapters, tokens):
    x, wider = random(kind, tokens, groups, width), random(kind, tokens, groups, 2 * width)
    lora, summed = None, wider.float()
    if adapters:
        lora, summed = adapted(kind, wider)
        lora = LoraDelta(lora.rows.view_as(wider)[..., width:], lora.tokens)
    weight = random((kind[0], torch.float32), groups * width)
    gated = x.float() * torch.nn.functional.silu(summed[..., width:])
    means = gated.square().mean(-1)
    want = gated / (means.unsqueeze(-1) + 1e-5).sqrt() * weight.view(groups, width)
    for operators in (fused, reference):
        copy = wider.clone()[..., width:]
        got = operators.gated_mean_squares(x, copy, lora)
        # torch rounds the sum of gate and LoRA
        torch.testing.assert_close(got, means, rtol=4 * torch.finfo(kind[1]).eps, atol=0)
        for given in (None, got):
            copy = wider.clone()[..., width:]
            y = operators.gated_group_norm(x, copy, weight, 1e-5, lora, given)
            assert y.dtype == kind[1]
            assert_close(y, want)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("width", [8, 1500])
def test_squared_relu(kind, width, adapters, tokens):
    x, lora = random(kind, tokens, width), None
    summed = x.float()
    if adapters:
        lora, summed = adapted(kind, x)
    want = summed.clamp(min=0).square()
    for operators in (fused, reference):
        assert_close(operators.squared_relu(x.clone(), lora), want)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
def test_an_expert_of_all_tokens_is_added_without_weights(kind, adapters, tokens):
    y, x, lora = random(kind, tokens, 1500), random(kind, 1500, tokens).T.contiguous(), None
    summed = x.float()
    if adapters:
        lora, summed = adapted(kind, x)
    want = y.float() + summed
    for operators in (fused, reference):
        changed = y.clone()
        operators.add_weighed(changed, x.clone(), lora)
        assert_close(changed, want)


def test_gates_equal_those_of_transformers():
    norm, x, gate = Qwen3_5RMSNormGated(32, eps=1e-6), *random(("cpu", torch.float32), 2, 3, 4, 32)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        reference.gated_rms_norm(x, gate, norm.weight.data, 1e-6), norm(x, gate).detach()
    )
    torch.testing.assert_close(reference.sigmoid_gate(x, gate), x * torch.sigmoid(gate))


def side_by_side(kept, heads, kv_heads):
    """Queries, keys and values of all processes' qkv."""
    sides = [qkv.split([heads, kv_heads, kv_heads], dim=1) for qkv in kept]
    return torch.cat([part for side in zip(*sides, strict=True) for part in side], dim=1)


@sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("operators", [fused, reference], ids=["fused", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(10, 2, 128), (6, 3, 96), (1, 1, 32)])
def test_heads_of_two_processes_are_normed_together(
    kind, operators, heads, kv_heads, dim, adapters, tokens
):
    kept = [random(kind, tokens + n, heads + 2 * kv_heads, dim)[n:] for n in range(2)]
    loras = [adapted(kind, qkv)[0] if adapters else None for qkv in kept]
    weights = [(random(kind, heads * dim + n), random(kind, kv_heads * dim + n)) for n in (1, 2)]
    weights = [(query[n:], key[n:]) for n, (query, key) in enumerate(weights, 1)]
    angles = random((kind[0], torch.float32), tokens, dim // 2)
    at, slots = (angles.cos(), angles.sin()), torch.arange(tokens, device=kind[0])

    together, lora = side_by_side(kept, heads, kv_heads), None
    if adapters:
        rows = [each.rows.view_as(qkv) for each, qkv in zip(loras, kept, strict=True)]
        lora = LoraDelta(side_by_side(rows, heads, kv_heads).flatten(1), loras[0].tokens)
    norm = QkNorm(*map(torch.cat, zip(*weights, strict=True)), 1e-5)
    kv = random(kind, 2, 3, 16, 2 * kv_heads, dim)
    operators.rotary_and_store_kv(together, *at, kv, slots, lora, norm)

    squares = [
        operators.mean_squares(qkv, kv_heads, 2, each)
        for qkv, each in zip(kept, loras, strict=True)
    ]
    assert torch.equal(squares[0][:, 2:], torch.zeros(tokens, 2, device=kind[0]))
    for n, qkv in enumerate(kept):
        own_kv = random(kind, 2, 3, 16, kv_heads, dim)
        own = QkNorm(*weights[n], 1e-5, mean_squares=squares[0] + squares[1])
        operators.rotary_and_store_kv(qkv, *at, own_kv, slots, loras[n], own)
        assert_close(qkv[:, :heads], together[:, n * heads : (n + 1) * heads])
        filled = [each.flatten(1, 2)[:, :tokens] for each in (own_kv, kv)]
        assert_close(filled[0], filled[1][:, :, n * kv_heads : (n + 1) * kv_heads])


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_are_rounded_to_fp8(kind, normed, adapters):
    heads, kv_heads, dim, tokens = 10, 2, 128, 7
    qkv = random(kind, tokens, heads + 2 * kv_heads, dim)
    lora, _ = adapted(kind, qkv) if adapters else (None, None)
    norm = QkNorm(random(kind, dim), random(kind, dim + 2)[2:], 1e-5) if normed else None
    angles = random((kind[0], torch.float32), tokens, dim // 2)
    slots = torch.tensor([5, 17, -1, 47, 0, 20, 30], device=kind[0])
    scales = KvScales(key=0.015, value=0.31)
    same = random(kind, 2, 3, 16, kv_heads, dim).to(FP8_KV)
    turned, filled, kv = qkv.clone(), same.clone(), same.clone()
    fused.rotary_and_store_kv(turned, angles.cos(), angles.sin(), filled, slots, lora, norm, scales)
    reference.rotary_and_store_kv(qkv, angles.cos(), angles.sin(), kv, slots, lora, norm, scales)
    assert_equal(turned[:, :heads], qkv[:, :heads])
    # What was rounded the other way before may lie on the other side of a bound between two
    # numbers, and of more where a rotation leaves next to nothing: there FP8's are the closest.
    apart = (filled.view(torch.uint8).int() - kv.view(torch.uint8).int()).abs()
    assert (apart > 0).float().mean() < 0.01
    assert (apart > 1).float().mean() < 0.001
    untouched = [slot for slot in range(48) if slot not in slots.tolist()]
    for pages in (filled, kv):
        kept = pages.view(torch.uint8).flatten(1, 2)[:, untouched]
        assert torch.equal(kept, same.view(torch.uint8).flatten(1, 2)[:, untouched])


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operators", [fused, reference], ids=["fused", "reference"])
def test_fp8_saturates_large_numbers_and_turns_infinities_into_nan(kind, operators):
    values = [0.0, 1.0, -1.0, 447.0, 448.0, 500.0, -60000.0, 0.0009, float("inf"), -float("inf")]
    held = [0.0, 1.0, -1.0, 448.0, 448.0, 448.0, -448.0, 0.0, float("nan"), float("nan")]
    qkv = torch.zeros(1, 3, 32, device=kind[0])
    qkv[0, 1, :10] = torch.tensor(values)
    qkv[0, 2, :10] = torch.tensor(values) / 4
    kv = torch.ones(2, 1, 16, 1, 32, device=kind[0]).to(FP8_KV)
    angles = torch.zeros(1, 16, device=kind[0])
    slots = torch.tensor([3], device=kind[0])
    scales = KvScales(key=1.0, value=0.25)
    operators.rotary_and_store_kv(
        qkv.to(kind[1]), angles.cos(), angles.sin(), kv, slots, scales=scales
    )
    for stored in kv[:, 0, 3, 0, :10].float().cpu():
        assert stored.tolist() == pytest.approx(held, nan_ok=True, abs=0)
