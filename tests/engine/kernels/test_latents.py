"""Kernels of latent attention equal torch; without a GPU they run in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from lorikeet_engine.adapter import MAX_MEMBERS
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels import latents
from lorikeet_engine.kernels.attention import check_latents
from lorikeet_engine.kernels.attention.protocol import AttentionShape
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.attention.wide_heads import WideAttention
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales
from lorikeet_engine.kernels.latents import AbsorbedWeight, LatentNorms, fused
from lorikeet_engine.kernels.lora.tiles import list_tiles
from lorikeet_engine.kernels.lora.types import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
)
from tests.engine.interpreter import DEVICES, INTERPRETED
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.test_paged_decode import PAGE, TOLERANCE, dtype_of, step_of
from tests.engine.kernels.test_wide_heads import MIXED, PROMPTS

reference = in_torch(latents)

HEADS, PLAIN, ROTARY, VALUES, QUERY_RANK, KV_RANK = 5, 12, 16, 20, 28, 64
DECODES = ([18, 130, 1, 300], [1, 1, 1, 1])


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture
def draw(device):
    generator = torch.Generator(device).manual_seed(1)

    def draw(*size, dtype=torch.float32):
        return torch.randn(size, generator=generator, device=device).to(dtype)

    return draw


def turns_of(draw, tokens):
    angles = draw(tokens, ROTARY // 2)
    return angles.cos(), angles.sin()


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("query_rank", [QUERY_RANK, 0])
def test_latents_are_normalised_and_stored_beside_turned_keys(
    device, draw, interleaved, adapters, scale, query_rank
):
    tokens, width = 9, query_rank + KV_RANK + ROTARY
    y, (cos, sin) = draw(tokens, width), turns_of(draw, tokens)
    norms = LatentNorms(draw(query_rank) if query_rank else None, draw(KV_RANK), 1e-6)
    slots = torch.tensor([3, 40, -1, 17, 0, 1, 2, 30, 5], device=device)
    delta = LoraDelta(draw(tokens, width), torch.tensor([6], dtype=torch.int32, device=device))
    scales = None if scale is None else KvScales(scale, scale)
    dtype = torch.float32 if scale is None else FP8_KV
    results = []
    for operators in (fused, reference):
        pages = torch.zeros(1, 3, PAGE, 1, KV_RANK + ROTARY, device=device).to(dtype)
        given = (y.clone(), cos, sin, pages, slots, norms, delta if adapters else None, scales)
        queries = operators.store_latents(*given, interleaved=interleaved)
        results.append((queries, pages.float()))
    (queries, pages), (want, want_pages) = results
    assert queries.shape == (tokens, query_rank)
    assert_close(queries, want)
    if scale is None:
        assert_close(pages, want_pages)
    else:  # some numbers are halfway between two of FP8
        assert (pages != want_pages).float().mean() < 0.01


def adapted(draw, device, ranks, lengths):
    """A weight, and a step whose segments have adapters of these ranks."""
    width = HEADS * (PLAIN + VALUES)
    rows, parts, end = [], [], 0
    for rank in ranks:
        room = [-(-rank * side // 16) * 16 for side in (KV_RANK, width)]
        rows.append([end, end + room[0], rank])
        parts.append(draw(sum(room)) / 4)
        end += sum(room)
    table = torch.zeros(len(ranks), 2, 3, 3, dtype=torch.int64, device=device)
    table[:, 1, 2] = torch.tensor(rows, device=device)
    weights = LoraWeights(torch.cat(parts), table)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    integers = (torch.arange(len(ranks)), starts, torch.tensor(lengths))
    segments = Segments(*(each.int().to(device) for each in integers), max_rank=max(ranks))
    group = LoraGroup((2,), KV_RANK, (width,))
    weight = AbsorbedWeight(draw(HEADS, PLAIN + VALUES, KV_RANK), PLAIN, 1, group)
    return weight, segments, weights


def composed(segments, weights):
    """Make each segment's adapter a composition with the next segment's adapter."""
    count, device = len(segments), weights.table.device
    own = torch.arange(count)
    members = torch.full((2 * count, MAX_MEMBERS), -1, dtype=torch.int32)
    members[:, 0], members[count:, 1] = torch.cat([own, own]), own.roll(-1)
    of_members = torch.ones(2 * count, MAX_MEMBERS)
    of_members[count:, :2] = torch.tensor([0.5, -1.5])
    weights = replace(
        weights,
        table=torch.cat([weights.table, torch.zeros_like(weights.table)]),
        members=members.to(device),
        member_weights=of_members.to(device),
    )
    slots, most = segments.slots + count, 2 * segments.max_rank
    return replace(segments, slots=slots, max_rank=most, composed=True), weights


STEPS = {
    "decodes": ([4, 0, 20, 70], [1, 1, 1, 1], 6),
    "prompts": ([8, 3, 0], [19, 1, 9], 31) if INTERPRETED else ([8, 3, 0], [37, 1, 90], 140),
}


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_queries_are_absorbed_with_the_adapters_of_their_tokens(
    device, draw, name, interleaved, compose
):
    ranks, lengths, tokens = STEPS[name]
    weight, segments, weights = adapted(draw, device, ranks, lengths)
    if compose:
        segments, weights = composed(segments, weights)
    q, (cos, sin) = draw(tokens, HEADS, PLAIN + ROTARY), turns_of(draw, tokens)
    count = torch.tensor([sum(lengths)], dtype=torch.int32, device=device)
    delta, tiles = LoraDelta(draw(*q.shape), count), list_tiles(segments, tokens)
    for step, lora in ((LoraStep(weights, segments, tiles), delta), (None, None)):
        got, want = (
            each.absorb_queries(q.clone(), cos, sin, weight, lora, step, interleaved=interleaved)
            for each in (fused, reference)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_outputs_are_expanded_with_the_adapters_of_their_tokens(device, draw, name, compose):
    ranks, lengths, tokens = STEPS[name]
    weight, segments, weights = adapted(draw, device, ranks, lengths)
    if compose:
        segments, weights = composed(segments, weights)
    mixed, tiles = draw(tokens, HEADS, KV_RANK), list_tiles(segments, tokens)
    for step in (LoraStep(weights, segments, tiles), None):
        got, want = (each.expand_outputs(mixed, weight, step) for each in (fused, reference))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("heads", [20, 3])
@pytest.mark.parametrize("scales", [None, KvScales(0.02, 0.02)])
@pytest.mark.parametrize(("step", "room"), [(PROMPTS, None), (MIXED, 4), (DECODES, 4)])
def test_attention_reads_values_out_of_keys(device, draw, heads, scales, step, room):
    dtype, latent = dtype_of(device), 512
    shape = AttentionShape(heads, 1, latent + 64, PAGE, dtype, scale=0.05, latent=latent)
    lengths, queries = step
    backend, batch = WideAttention(shape, device), step_of(lengths, queries, (None,))
    if room is not None:
        backend.captured(room, torch.zeros(1, 4096, dtype=torch.int32, device=device))
    total = int(batch.page_tables[0].pages.max()) + 4
    kv = draw(1, total, PAGE, 1, latent + 64)
    kv = kv.to(dtype) if scales is None else (8 * kv).to(FP8_KV)
    q = draw(sum(queries), heads, latent + 64, dtype=dtype)
    backend.plan(batch)
    got = backend.attend(q, kv, batch, scales)
    want = SdpaAttention(None, shape.scale, latent).attend(q, kv, batch, scales)
    assert got.shape == (sum(queries), heads, latent)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_latents_without_kernels_are_refused_by_name():
    check_latents(512, 64)
    check_latents(256, 32)
    for latent, rotary in ((384, 64), (512, 24), (1024, 64), (512, 8)):
        with pytest.raises(SettingsError, match=f"kv_lora_rank={latent}"):
            check_latents(latent, rotary)
