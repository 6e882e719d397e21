"""Mamba 2's kernels equal torch's; without a GPU they run in Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from lorikeet_engine.kernels import mamba
from lorikeet_engine.kernels.delta_net import CHUNK, Decodes, Heads, Prefills, Ring
from lorikeet_engine.kernels.mamba import Scan, fused
from tests.engine.interpreter import DEVICES, KINDS, slow
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.mamba_inputs import HEADS, Inputs, inputs
from tests.engine.kernels.test_delta_net_kernels import (
    adapted,
    assert_close,
    eps_of,
    indices,
    merged,
    strided,
)

reference = in_torch(mamba)

REAL = Heads(1, 2, 128, 64)
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
LIMITS = (0.25, 1.5)


def wide(drawn: Inputs) -> Inputs:
    """The same operands in float64."""
    scan = drawn.scan
    weights = (each.double() for each in (scan.a_log, scan.dt_bias, scan.d))
    others = {name: each.double() for name, each in vars(drawn).items() if name != "scan"}
    return Inputs(**others, scan=Scan(*weights, scan.time_limits))


def ring_of(drawn: Inputs, heads: Heads, entries: int, counts: list[int], dtype=torch.float32):
    """Rings with tokens in each slot, NaN where there are none."""
    device = drawn.states.device
    ring = Ring.empty([len(drawn.states)], heads, entries, dtype, device)
    generator = torch.Generator().manual_seed(3)
    for slot, count in enumerate(counts):
        for each in (ring.keys, ring.corrections, ring.decays):
            drawn_now = torch.randn(each[slot].shape, generator=generator, dtype=torch.float64)
            each[slot] = drawn_now.to(device, dtype)
            each[slot, :, count:] = torch.nan
        ring.decays[slot] = -ring.decays[slot].abs()
        ring.counts[slot] = count
    return ring


@STATES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("limits", [(0.0, math.inf), LIMITS])
@pytest.mark.parametrize("heads", [*HEADS, REAL])
def test_decode_scan(kind, heads, limits, adapters, state_dtype):
    drawn = inputs(5, heads, kind[1], device=kind[0], state_dtype=state_dtype, time_limits=limits)
    dt, slots = strided(drawn.dt), indices([5, 0, -1, 6, 2], kind[0])
    lora = adapted(dt, 3) if adapters else None
    exact, decodes = wide(drawn), Decodes(slots)
    want = reference.decode_scan(
        exact.xbc, merged(dt.double(), lora), exact.scan, exact.states, decodes, heads
    )
    states = drawn.states.clone()
    y = fused.decode_scan(strided(drawn.xbc), dt, drawn.scan, states, decodes, heads, lora)
    kept = slots >= 0
    assert_close(y[kept], want[kept], 2 * eps_of(kind[1]))
    assert_close(states, exact.states, eps_of(state_dtype) + 4 * eps_of(torch.float32))
    untouched = [1, 3, 4]
    assert torch.equal(states[untouched], drawn.states[untouched])


@STATES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("heads", [*HEADS, REAL])
def test_decode_scan_with_a_ring(kind, heads, entries, state_dtype):
    drawn = inputs(5, heads, kind[1], device=kind[0], state_dtype=state_dtype)
    slots = indices([5, 0, -1, 6, 2], kind[0])
    counts = [entries, 0, 1, 0, 0, 0, entries - 1]
    ring = ring_of(drawn, heads, entries, counts)
    exact, decodes = wide(drawn), Decodes(slots)
    exact_ring = Ring(*(each.double() for each in ring[:3]), ring.counts.clone())
    want = reference.decode_scan(
        exact.xbc, exact.dt, exact.scan, exact.states, decodes, heads, ring=exact_ring
    )
    states = drawn.states.clone()
    y = fused.decode_scan(drawn.xbc, drawn.dt, drawn.scan, states, decodes, heads, ring=ring)
    kept = slots >= 0
    assert_close(y[kept], want[kept], 4 * eps_of(kind[1]))
    assert_close(states, exact.states, eps_of(state_dtype) + 8 * eps_of(torch.float32))
    assert torch.equal(ring.counts, exact_ring.counts)
    assert ring.counts[:, 0, 0].tolist() == [0, 0, 2 if entries > 1 else 0, 0, 0, 1, entries]
    for got, hoped in zip(ring[:3], exact_ring[:3], strict=True):
        assert torch.equal(got.isnan(), hoped.isnan())
        assert_close(got.nan_to_num(), hoped.nan_to_num(), 8 * eps_of(torch.float32))


@STATES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entries", [0, 3])
@pytest.mark.parametrize(
    ("heads", "lengths", "adapters"),
    [
        (HEADS[0], [130, 3], False),
        (HEADS[1], [70, 1, 64, 2], True),
        (HEADS[2], [1], True),
        (HEADS[3], [66, 2], False),
        *slow((REAL, [200, 65], True), (HEADS[0], [640, 1, 63], False)),
    ],
)
def test_prefill_scan(kind, heads, lengths, adapters, entries, state_dtype):
    drawn = inputs(
        sum(lengths), heads, kind[1], device=kind[0], state_dtype=state_dtype, time_limits=LIMITS
    )
    dt, prefills = strided(drawn.dt), Prefills.of(lengths, [5, 0, 6, 2][: len(lengths)], kind[0])
    saves = prefills.saves.clone()
    if lengths[0] >= CHUNK:
        saves[0] = 3
    prefills = prefills._replace(saves=saves)
    lora = adapted(dt, len(dt) // 2 + 1) if adapters else None
    exact, ring, exact_ring = wide(drawn), None, None
    if entries:
        ring = ring_of(drawn, heads, entries, [3, 0, 1, 2, 0, 2, 3])
        exact_ring = Ring(*(each.double() for each in ring[:3]), ring.counts.clone())
    want = reference.prefill_scan(
        exact.xbc, merged(dt.double(), lora), exact.scan, exact.states, prefills, heads,
        ring=exact_ring,
    )  # fmt: skip
    states = drawn.states.clone()
    y = fused.prefill_scan(
        strided(drawn.xbc), dt, drawn.scan, states, prefills, heads, lora, ring=ring
    )
    # sums of products of factors that are rounded to the dtype
    eps = (16 if kind[1] == torch.float32 else 8) * eps_of(kind[1])
    assert_close(y, want, eps)
    assert_close(states, exact.states, eps_of(state_dtype) + eps)
    if ring is not None:
        assert torch.equal(ring.counts, exact_ring.counts)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_neither_read_nor_written(device):
    heads = HEADS[0]
    drawn = inputs(70, heads, torch.float32, device=device)
    alone = Prefills.of([70], [2], device)

    def padded(tensor, more):
        pad = torch.full((more, *tensor.shape[1:]), -1, dtype=torch.int32, device=device)
        return torch.cat([tensor, pad])

    padding = Prefills(*(padded(each, 2) for each in alone))
    results = []
    for prefills in (alone, padding):
        states = drawn.states.clone()
        y = fused.prefill_scan(drawn.xbc, drawn.dt, drawn.scan, states, prefills, heads)
        results.append((y, states))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_a_strong_decay_forgets_and_makes_no_nan(device):
    heads = HEADS[0]
    drawn = inputs(100, heads, torch.float32, device=device)
    scan = replace(drawn.scan, a_log=torch.full_like(drawn.scan.a_log, 6.0))
    states = drawn.states.clone()
    y = fused.prefill_scan(
        drawn.xbc, drawn.dt, scan, states, Prefills.of([100], [1], device), heads
    )
    assert y.isfinite().all()
    assert states.isfinite().all()
