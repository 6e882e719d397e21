"""The gated delta net in torch equals transformers', however a prompt is divided."""

import inspect
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import Decodes, Heads, Prefills
from lorikeet_engine.kernels.lora.types import LoraDelta
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.delta_net_inputs import CPU, HEADS, Inputs, inputs, recurrence

reference = in_torch(delta_net)

ODD = (1, 2, 3, 5, 31, 63, 64, 65, 67, 127, 128, 129, 191, 193, 200)


def in_float64(function):
    """A function of transformers that casts to float64 where it casts to float32."""
    source = inspect.getsource(inspect.unwrap(function)).replace("torch.float32", "torch.float64")
    scope = dict(vars(qwen))
    exec(source[source.index("def ") :], scope)  # without decorators
    return scope[function.__name__]


RECURRENT = in_float64(qwen.torch_recurrent_gated_delta_rule)
CHUNKED = in_float64(qwen.torch_chunk_gated_delta_rule)


def by_transformers(rule, given: Inputs, heads: Heads, states, length):
    """Outputs and the last state of one sequence's first tokens, in our layouts."""
    q, k, v = given.qkv[None, :length].split(heads.widths, dim=2)
    q, k = (each.view(1, length, heads.key_heads, -1) for each in (q, k))
    b, a = given.ba[None, :length].chunk(2, dim=2)
    g = -given.decay.a_log.exp() * torch.nn.functional.softplus(a + given.decay.dt_bias)
    o, state = rule(
        q, k, v.view(1, length, heads.value_heads, -1), g, b.sigmoid(),
        initial_state=states.mT[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return o[0], state[0].mT


def assert_equal(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", [RECURRENT, CHUNKED], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", ODD)
def test_a_prefill_equals_transformers_in_float64(length, heads, rule):
    given = inputs(length, heads, torch.float64)
    states = given.states.clone()
    want, last = by_transformers(rule, given, heads, states[2], length)
    o = reference.prefill_delta_rule(
        given.qkv, given.ba, given.decay, states, Prefills.of([length], [2], CPU), heads
    )
    assert_equal(o, want)
    assert_equal(states[2], last)
    others = [0, 1, *range(3, len(states))]
    assert torch.equal(states[others], given.states[others])


def test_both_forms_agree_at_every_length():
    heads = HEADS[0]
    lengths = range(1, 201)
    given = inputs(sum(lengths), heads, torch.float64, slots=len(lengths))
    starts = torch.tensor([0, *accumulate(lengths)])
    operands = reference._operands(given.qkv, given.ba, given.decay, heads)
    want, last = recurrence(operands, starts, given.states)
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        own = slice(start, end)
        o, states = reference.chunked_recurrence(operands.of(own), given.states[sequence])
        assert_equal(o, want[own])
        assert_equal(states[-1], last[sequence])


@pytest.mark.parametrize("heads", HEADS)
def test_packed_sequences_compute_what_each_computes_alone(heads):
    lengths, slots = [70, 1, 64, 129, 2], [3, 0, 6, 1, 4]
    given = inputs(sum(lengths), heads, torch.float64)
    states, alone = given.states.clone(), given.states.clone()
    prefills = Prefills.of(lengths, slots, CPU)
    o = reference.prefill_delta_rule(given.qkv, given.ba, given.decay, states, prefills, heads)
    for slot, (start, end) in zip(slots, pairwise([0, *accumulate(lengths)]), strict=True):
        part = given.tokens(start, end)
        want, alone[slot] = by_transformers(CHUNKED, part, heads, alone[slot], end - start)
        assert_equal(o[start:end], want)
    assert_equal(states, alone)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 199), max_size=6),
    width=st.integers(2, 5),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_a_prompt_may_be_divided_anywhere(cuts, width, dtype):
    """One token is computed as a decode, several as a prefill."""
    heads = HEADS[1]
    given = inputs(200, heads, dtype, width=width)
    results = []
    for bounds in ([0, 200], sorted({0, 200, *cuts})):
        states, last_inputs, parts = given.states.clone(), given.last_inputs.clone(), []
        for start, end in pairwise(bounds):
            part = given.tokens(start, end)
            decodes = Decodes(torch.tensor([1], dtype=torch.int32))
            rest = (part.ba, part.decay, states)
            if end - start == 1:
                y = delta_net.decode_convolution(part.qkv, part.weight, last_inputs, decodes)
                o = delta_net.decode_delta_rule(y, *rest, decodes, heads)
            else:
                prefills = Prefills.of([end - start], [1], CPU)
                y = delta_net.prefill_convolution(part.qkv, part.weight, last_inputs, prefills)
                o = delta_net.prefill_delta_rule(y, *rest, prefills, heads)
            parts.append((y, o))
        convolved, o = (torch.cat(each) for each in zip(*parts, strict=True))
        results.append((convolved, last_inputs, o, states))
    for whole, divided in list(zip(*results, strict=True))[:2]:
        assert torch.equal(divided, whole)
    for whole, divided in list(zip(*results, strict=True))[2:]:
        assert_equal(divided, whole, 1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_the_convolution_equals_transformers(length):
    given = inputs(length, HEADS[0], torch.float64)
    states = given.last_inputs.clone()
    kept = states[2].T[None].clone()  # [1, channels, 3]
    x = given.qkv.T[None]
    padded = torch.cat([kept, x], dim=2)
    want = qwen.causal_conv1d_fn(padded, given.weight, None, "silu")[0, :, 3:].T
    y = reference.prefill_convolution(
        given.qkv, given.weight, states, Prefills.of([length], [2], CPU)
    )
    assert_equal(y, want)
    assert torch.equal(states[2], padded[0, :, -3:].T)
    for token in range(length):
        step = qwen.causal_conv1d_update(
            x[:, :, token : token + 1], kept, given.weight, None, "silu"
        )
        assert_equal(y[token], step[0, :, 0])


def test_decodes_advance_each_sequence_by_one_token():
    heads = HEADS[0]
    given = inputs(4, heads, torch.float64)
    slots = torch.tensor([5, -1, 0, 2], dtype=torch.int32)
    states, last_inputs = given.states.clone(), given.last_inputs.clone()
    decodes = Decodes(slots)
    y = reference.decode_convolution(given.qkv, given.weight, last_inputs, decodes)
    o = reference.decode_delta_rule(y, given.ba, given.decay, states, decodes, heads)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        part, kept = given.tokens(row, row + 1), given.last_inputs[slot].T[None]
        convolved = qwen.causal_conv1d_update(part.qkv.T[None], kept, given.weight, None, "silu")
        assert_equal(y[row], convolved[0, :, 0])
        assert_equal(last_inputs[slot], kept[0].T)
        part = Inputs(**vars(part) | {"qkv": convolved[0].T})
        want, state = by_transformers(RECURRENT, part, heads, given.states[slot], 1)
        assert_equal(o[row], want[0])
        assert_equal(states[slot], state)
    untouched = [1, 3, 4, 6]
    assert torch.equal(states[untouched], given.states[untouched])
    assert torch.equal(last_inputs[untouched], given.last_inputs[untouched])


def test_lora_is_added_to_the_products_before_all_else():
    heads = HEADS[1]
    given, lengths = inputs(80, heads, torch.float32), [9, 71]
    prefills, decodes = (
        Prefills.of(lengths, [1, 4], CPU),
        Decodes(torch.arange(80, dtype=torch.int32)),
    )
    adapted, results = 37, []
    deltas = [torch.randn_like(given.qkv), torch.randn_like(given.ba)]
    for delta in deltas:
        delta[adapted:] = torch.nan
    for merged in (True, False):
        made = inputs(80, heads, torch.float32, slots=80)
        loras = [LoraDelta(delta, torch.tensor([adapted], dtype=torch.int32)) for delta in deltas]
        if merged:
            made.qkv[:adapted] += deltas[0][:adapted]
            made.ba[:adapted] += deltas[1][:adapted]
            loras = [None, None]
        for convolve, rule, where in (
            (delta_net.decode_convolution, delta_net.decode_delta_rule, decodes),
            (delta_net.prefill_convolution, delta_net.prefill_delta_rule, prefills),
        ):
            states, last_inputs = made.states.clone(), made.last_inputs.clone()
            x, ba = made.qkv.clone(), made.ba.clone()
            y = convolve(x, made.weight, last_inputs, where, loras[0])
            o = rule(y, ba, made.decay, states, where, heads, loras[1])
            results.append((y, o, states, last_inputs))
    for want, got in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_prefills_list_the_chunks_of_each_sequence():
    prefills = Prefills.of([1, 64, 130], [7, 0, 3], CPU)
    assert prefills.starts.tolist() == [0, 1, 65]
    assert prefills.ends.tolist() == [1, 65, 195]
    assert prefills.slots.tolist() == [7, 0, 3]
    assert prefills.chunks.tolist() == [[0, 0], [1, 1], [2, 65], [2, 129], [2, 193]]
    assert prefills.first_chunks.tolist() == [0, 1, 2, 5]
