"""Mamba 2's scan in torch equals transformers', however a prompt is divided, with a ring or not."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from lorikeet_engine.kernels import mamba
from lorikeet_engine.kernels.delta_net import Decodes, Heads, Prefills, Ring
from lorikeet_engine.kernels.lora.types import LoraDelta
from tests.engine.kernels.mamba_inputs import CPU, HEADS, Inputs, inputs

LIMITS = [(0.0, math.inf), (0.3, 1.1)]


def by_transformers(drawn: Inputs, heads: Heads, state, length):
    """Outputs and the last state of one sequence's first tokens, in float32."""
    keys, _, values = heads.widths
    x, b, c = drawn.xbc[None, :length].split([values, keys, keys], dim=2)
    b, c = (each.view(1, length, heads.key_heads, -1) for each in (b, c))
    scan = drawn.scan
    y, last = granite.mamba2_chunk_scan(
        x.view(1, length, heads.value_heads, -1), drawn.dt[None, :length], -scan.a_log.exp(), b, c,
        chunk_size=16, D=scan.d, dt_bias=scan.dt_bias, initial_states=state[None],
        dt_softplus=True, dt_limit=scan.time_limits, return_final_states=True,
    )  # fmt: skip
    return y[0], last[0]


def assert_equal(got, want):
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(got, want, rtol=0, atol=100 * eps * want.abs().max().item())


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_a_prefill_equals_transformers(length, heads, limits):
    drawn = inputs(length, heads, torch.float32, time_limits=limits)
    states = drawn.states.clone()
    want, last = by_transformers(drawn, heads, states[2], length)
    y = mamba.prefill_scan(
        drawn.xbc, drawn.dt, drawn.scan, states, Prefills.of([length], [2], CPU), heads
    )
    assert_equal(y, want)
    assert_equal(states[2], last)
    others = [0, 1, *range(3, len(states))]
    assert torch.equal(states[others], drawn.states[others])


@pytest.mark.parametrize("heads", HEADS)
def test_packed_sequences_compute_what_each_computes_alone(heads):
    lengths, slots = [70, 1, 64, 129, 2], [3, 0, 6, 1, 4]
    drawn = inputs(sum(lengths), heads, torch.float32)
    states, alone = drawn.states.clone(), drawn.states.clone()
    prefills = Prefills.of(lengths, slots, CPU)
    y = mamba.prefill_scan(drawn.xbc, drawn.dt, drawn.scan, states, prefills, heads)
    for slot, (start, end) in zip(slots, pairwise([0, *accumulate(lengths)]), strict=True):
        part = drawn.tokens(start, end)
        want, alone[slot] = by_transformers(part, heads, alone[slot], end - start)
        assert_equal(y[start:end], want)
    assert_equal(states, alone)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 199), max_size=6),
    singles=st.integers(0, 9),
    entries=st.sampled_from([0, 1, 3]),
    limits=st.sampled_from(LIMITS),
)
def test_a_prompt_may_be_divided_anywhere(cuts, singles, entries, limits):
    """One token is computed as a decode, several as a prefill; rings hold some of the tokens."""
    heads = HEADS[1]
    drawn = inputs(200, heads, torch.float64, time_limits=limits)
    results = []
    last = 200 - singles
    for bounds in ([0, last], sorted({0, last, *(cut for cut in cuts if cut < last)})):
        states, parts = drawn.states.clone(), []
        ring = Ring.empty([7], heads, entries, torch.float64, CPU) if entries else None
        for start, end in pairwise([*bounds, *range(last + 1, 201)]):
            part = drawn.tokens(start, end)
            rest = part.xbc, part.dt, part.scan, states
            decodes = Decodes(torch.tensor([1], dtype=torch.int32))
            if end - start == 1:
                parts.append(mamba.decode_scan(*rest, decodes, heads, ring=ring))
            else:
                prefills = Prefills.of([end - start], [1], CPU)
                parts.append(mamba.prefill_scan(*rest, prefills, heads, ring=ring))
        # the prefill of one more token adds those in the ring to the state
        more = inputs(2, heads, torch.float64, time_limits=limits)
        prefills = Prefills.of([2], [1], CPU)
        rest = more.xbc, more.dt, drawn.scan, states
        parts.append(mamba.prefill_scan(*rest, prefills, heads, ring=ring))
        results.append((torch.cat(parts), states))
    for whole, divided in zip(*results, strict=True):
        torch.testing.assert_close(divided, whole, rtol=1e-10, atol=1e-10)


def test_adapters_change_the_time_steps_of_their_tokens():
    heads = HEADS[0]
    drawn = inputs(5, heads, torch.float32)
    delta = torch.randn(5, heads.value_heads, generator=torch.Generator().manual_seed(1))
    lora = LoraDelta(delta, torch.tensor([3], dtype=torch.int32))
    slots = Prefills.of([5], [2], CPU)
    states, merged = drawn.states.clone(), drawn.states.clone()
    y = mamba.prefill_scan(drawn.xbc, drawn.dt, drawn.scan, states, slots, heads, lora)
    dt = torch.cat([drawn.dt[:3] + delta[:3], drawn.dt[3:]])
    want = mamba.prefill_scan(drawn.xbc, dt, drawn.scan, merged, slots, heads)
    assert torch.equal(y, want)
    assert torch.equal(states, merged)
    assert not torch.equal(
        want, mamba.prefill_scan(drawn.xbc, drawn.dt, drawn.scan, merged, slots, heads)
    )


def test_a_state_is_copied_behind_a_chunk():
    heads = HEADS[2]
    drawn = inputs(130, heads, torch.float32)
    prefills = Prefills.of([130], [2], CPU)
    saves = torch.tensor([-1, 5, -1], dtype=torch.int32)
    states, until = drawn.states.clone(), drawn.states.clone()
    operands = drawn.xbc, drawn.dt, drawn.scan
    mamba.prefill_scan(*operands, states, prefills._replace(saves=saves), heads)
    half = drawn.tokens(0, 128)
    mamba.prefill_scan(half.xbc, half.dt, half.scan, until, Prefills.of([128], [2], CPU), heads)
    assert_equal(states[5], until[2])
