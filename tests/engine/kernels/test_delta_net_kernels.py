"""The gated delta net's kernels equal torch's; without a GPU they run in Triton's interpreter."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import CHUNK, Decay, Decodes, Heads, Prefills, fused
from lorikeet_engine.kernels.lora.types import LoraDelta
from tests.engine.interpreter import DEVICES, KINDS, slow
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.delta_net_inputs import HEADS, Inputs, inputs, recurrence

reference = in_torch(delta_net)

REAL = Heads(1, 2, 128, 128)
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
LENGTHS = [[1], [70, 1, 64, 2], [130, 3]]


def wide(given: Inputs) -> Inputs:
    """The same operands in float64."""
    decay = Decay(given.decay.a_log.double(), given.decay.dt_bias.double())
    others = {name: each.double() for name, each in vars(given).items() if name != "decay"}
    return Inputs(**others, decay=decay)


def assert_close(got, want, eps):
    """Compare with float64; eps: relative to the largest number, as errors are those of sums."""
    torch.testing.assert_close(got.double(), want, rtol=0, atol=eps * want.abs().max().item())


def eps_of(*dtypes):
    """The coarsest of some dtypes' eps."""
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def indices(slots, device):
    return torch.tensor(slots, dtype=torch.int32, device=device)


def adapted(rows, count):
    """LoRA of the first rows, NaN in the others, with strides like those of rows."""
    wider = torch.full((len(rows), rows.stride(0)), torch.nan, dtype=rows.dtype).to(rows.device)
    delta = wider[:, : rows.shape[1]]
    delta[:count] = rows.flip(1)[:count]
    return LoraDelta(delta, torch.tensor([count], dtype=torch.int32, device=rows.device))


def strided(rows):
    """The same rows as a part of a wider tensor, NaN beside them."""
    wider = torch.full((len(rows), rows.shape[1] + 16), torch.nan, dtype=rows.dtype)
    wider = wider.to(rows.device)
    wider[:, : rows.shape[1]] = rows
    return wider[:, : rows.shape[1]]


def merged(rows, lora):
    summed = rows.clone(memory_format=torch.contiguous_format)
    if lora is not None:
        count = int(lora.tokens)
        summed[:count] += lora.rows[:count]
    return summed


def bias_of(given, has_bias):
    """A bias of the convolution: the weight's last column, or none."""
    return given.weight[:, -1].contiguous() if has_bias else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("width", [4, 2])
def test_decode_convolution(kind, width, adapters, has_bias):
    given = inputs(5, HEADS[1], kind[1], width=width, device=kind[0])
    x, slots = strided(given.qkv), indices([5, 0, -1, 6, 2], kind[0])
    decodes = Decodes(slots)
    lora = adapted(x, 3) if adapters else None
    states, want_states = given.last_inputs.clone(), given.last_inputs.clone()
    bias = bias_of(given, has_bias)
    want = reference.decode_convolution(
        merged(x, lora), given.weight, want_states, decodes, bias=bias
    )
    y = fused.decode_convolution(x, given.weight, states, decodes, lora, bias=bias)
    kept = slots >= 0
    eps = eps_of(kind[1])
    torch.testing.assert_close(y[kept], want[kept], rtol=4 * eps, atol=4 * eps)
    assert torch.equal(states, want_states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [4, 3])
def test_prefill_convolution(kind, width, lengths, adapters, has_bias):
    given = inputs(sum(lengths), HEADS[2], kind[1], width=width, device=kind[0])
    x, prefills = strided(given.qkv), Prefills.of(lengths, [5, 0, 6, 2][: len(lengths)], kind[0])
    lora = adapted(x, len(x) // 2 + 1) if adapters else None
    states, want_states = given.last_inputs.clone(), given.last_inputs.clone()
    bias = bias_of(given, has_bias)
    want = reference.prefill_convolution(
        merged(x, lora), given.weight, want_states, prefills, bias=bias
    )
    y = fused.prefill_convolution(x, given.weight, states, prefills, lora, bias=bias)
    eps = eps_of(kind[1])
    torch.testing.assert_close(y, want, rtol=4 * eps, atol=4 * eps)
    assert torch.equal(states, want_states)


@STATES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("heads", [*HEADS, REAL])
def test_decode_delta_rule(kind, heads, adapters, state_dtype):
    given = inputs(5, heads, kind[1], device=kind[0], state_dtype=state_dtype)
    ba, slots = strided(given.ba), indices([5, 0, -1, 6, 2], kind[0])
    decodes = Decodes(slots)
    lora = adapted(ba, 3) if adapters else None
    exact = wide(given)
    want = reference.decode_delta_rule(
        exact.qkv, merged(ba.double(), lora), exact.decay, exact.states, decodes, heads
    )
    states = given.states.clone()
    o = fused.decode_delta_rule(strided(given.qkv), ba, given.decay, states, decodes, heads, lora)
    kept = slots >= 0
    assert_close(o[kept], want[kept], 2 * eps_of(kind[1]))
    assert_close(states, exact.states, eps_of(state_dtype) + 4 * eps_of(torch.float32))
    untouched = [1, 3, 4]
    assert torch.equal(states[untouched], given.states[untouched])


@STATES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "lengths", "adapters"),
    [
        (HEADS[0], [130, 3], False),
        (HEADS[1], [70, 1, 64, 2], True),
        (HEADS[2], [1], True),
        *slow((REAL, [200, 65], True), (HEADS[0], [640, 1, 63], False)),
    ],
)
def test_prefill_delta_rule(kind, heads, lengths, adapters, state_dtype):
    given = inputs(sum(lengths), heads, kind[1], device=kind[0], state_dtype=state_dtype)
    ba, prefills = strided(given.ba), Prefills.of(lengths, [5, 0, 6, 2][: len(lengths)], kind[0])
    lora = adapted(ba, len(ba) // 2 + 1) if adapters else None
    exact = wide(given)
    want = reference.prefill_delta_rule(
        exact.qkv, merged(ba.double(), lora), exact.decay, exact.states, prefills, heads
    )
    states = given.states.clone()
    o = fused.prefill_delta_rule(strided(given.qkv), ba, given.decay, states, prefills, heads, lora)
    # five roundings to 16 bits on the way: state, values, system, correction, result
    eps = 16 * eps_of(torch.float32) if kind[1] == torch.float32 else 5 * eps_of(kind[1])
    assert_close(o, want, eps)
    assert_close(states, exact.states, eps + eps_of(state_dtype))
    untouched = [1, 3, 4]
    assert torch.equal(states[untouched], given.states[untouched])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_divided_anywhere_and_decoded_ends_in_the_same_state(kind):
    heads, decodes = HEADS[1], Decodes(indices([3], kind[0]))
    given = inputs(150, heads, kind[1], device=kind[0])
    exact, whole = wide(given), Prefills.of([150], [3], kind[0])
    want = reference.prefill_delta_rule(
        exact.qkv, exact.ba, exact.decay, exact.states, whole, heads
    )
    parts = []
    for start, end in pairwise([0, 1, 66, 67, 100, 150]):
        part = given.tokens(start, end)
        operands = (part.qkv, part.ba, part.decay, given.states)
        if end - start == 1:
            parts.append(fused.decode_delta_rule(*operands, decodes, heads))
        else:
            prefills = Prefills.of([end - start], [3], kind[0])
            parts.append(fused.prefill_delta_rule(*operands, prefills, heads))
    eps = 16 * eps_of(torch.float32) if kind[1] == torch.float32 else 5 * eps_of(kind[1])
    assert_close(torch.cat(parts), want, eps)
    assert_close(given.states, exact.states, eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operators", [fused, reference], ids=["fused", "reference"])
def test_states_behind_chunks_are_saved(operators, kind):
    """Each is the state in which the sequence ends if it ends there."""
    heads, lengths, slots = HEADS[2], [136, 3, 70], [5, 0, 6]
    given = inputs(sum(lengths), heads, kind[1], slots=9, device=kind[0])
    saves = indices([1, 8, -1, -1, 2, -1], kind[0])
    prefills = Prefills.of(lengths, slots, kind[0])._replace(saves=saves)
    assert len(prefills.chunks) == len(saves)
    lora = adapted(given.qkv, 130)

    def run(given, prefills, lora=None):
        states, last = given.states.clone(), given.last_inputs.clone()
        y = operators.prefill_convolution(given.qkv.clone(), given.weight, last, prefills, lora)
        o = operators.prefill_delta_rule(
            given.qkv, given.ba.clone(), given.decay, states, prefills, heads
        )
        return y, o, states, last

    y, o, states, last = run(given, prefills, lora)
    unsaved = run(given, Prefills.of(lengths, slots, kind[0]), lora)
    assert torch.equal(y, unsaved[0])
    assert torch.equal(o, unsaved[1])
    for first, tokens, slot, save in ((0, 64, 5, 1), (0, 128, 5, 8), (139, 64, 6, 2)):
        summed = replace(given, qkv=merged(given.qkv, lora)).tokens(first, first + tokens)
        alone = Prefills.of([tokens], [slot], kind[0])
        assert torch.equal(last[save], run(summed, alone)[3][slot])
        ended = run(given.tokens(first, first + tokens), alone)[2][slot]
        assert torch.equal(states[save], ended)
    for kept in (3, 4, 7):
        assert torch.equal(states[kept], given.states[kept])
        assert torch.equal(last[kept], given.last_inputs[kept])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operators", [fused, reference], ids=["fused", "reference"])
def test_equal_keys_without_decay_are_as_exact_as_others(operators, device):
    """Powers of such a chunk's system reach 10¹⁷: a series of powers would lose all digits."""
    heads, length = Heads(1, 1, 16, 16), 2 * CHUNK
    given = inputs(length, heads, torch.float32, device=device)
    given.qkv[:, 16:32] = given.qkv[0, 16:32].clone()
    given.ba.fill_(20.0)[:, 1:].fill_(-40.0)  # β is 1, g is 0
    exact, prefills = wide(given), Prefills.of([length], [0], device)
    starts = torch.tensor([0, length], device=device)
    operands = reference._operands(exact.qkv, exact.ba, exact.decay, heads)
    want, _ = recurrence(operands, starts, exact.states[:1])
    o = operators.prefill_delta_rule(
        given.qkv, given.ba, given.decay, given.states, prefills, heads
    )
    assert_close(o, want, 16 * eps_of(torch.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_strong_decay_forgets_and_makes_no_nan(device):
    heads = HEADS[0]
    given = inputs(100, heads, torch.float32, device=device)
    given.ba.fill_(1e4)  # exp(g) is 0, and the sum of g over a chunk overflows no float
    states = given.states.clone()
    o = fused.prefill_delta_rule(
        given.qkv, given.ba, given.decay, states, Prefills.of([100], [0], device), heads
    )
    want = reference.prefill_delta_rule(
        given.qkv, given.ba, given.decay, given.states, Prefills.of([100], [0], device), heads
    )
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(states, given.states)


@pytest.mark.parametrize("device", DEVICES)
def test_small_gates_keep_their_digits(device):
    """Softplus(−12) is 6.1e−6: a float32 of 1 + exp(−12) has kept two digits of it."""
    heads = HEADS[0]
    given = inputs(1, heads, torch.float32, device=device)
    decay = Decay(torch.full((2,), 10.0, device=device), torch.zeros(2, device=device))
    given.ba[:] = torch.tensor([-80.0, -80.0, -12.0, -30.0])  # β is 0: the state only decays
    before, decodes = given.states[0].double(), Decodes(indices([0], device))
    fused.decode_delta_rule(given.qkv, given.ba, decay, given.states, decodes, heads)
    rates = (
        -torch.tensor(10.0, dtype=torch.float64).exp()
        * torch.tensor([-12.0, -30.0], dtype=torch.float64).exp().log1p()
    )
    want = before * rates.exp().to(device)[:, None, None]
    torch.testing.assert_close(given.states[0].double(), want, rtol=4e-7, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_pools_may_have_the_states_of_other_layers_between_slots(device):
    heads = HEADS[0]
    given = inputs(70, heads, torch.float32, device=device)
    rule = (given.qkv, given.ba, given.decay)
    for name in ("rule", "convolution"):
        one_layer = given.states if name == "rule" else given.last_inputs
        layers = torch.stack([one_layer.flip(0), one_layer, one_layer.flip(0)], dim=1)
        kept, prefills = layers.clone(), Prefills.of([70], [2], device)
        for states in (one_layer, layers[:, 1]):
            if name == "rule":
                fused.prefill_delta_rule(*rule, states, prefills, heads)
                fused.decode_delta_rule(
                    *(each[:1] for each in rule[:2]), given.decay, states,
                    Decodes(indices([4], device)), heads,
                )  # fmt: skip
            else:
                fused.prefill_convolution(given.qkv, given.weight, states, prefills)
                decodes = Decodes(indices([4], device))
                fused.decode_convolution(given.qkv[:1], given.weight, states, decodes)
        assert torch.equal(layers[:, 1], one_layer)
        assert torch.equal(layers[:, ::2], kept[:, ::2])
        assert not torch.equal(layers[:, 1], kept[:, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operators", [fused, reference], ids=["fused", "reference"])
def test_a_step_of_decodes_and_prompts_computes_what_each_sequence_computes_alone(operators, kind):
    """Sequences of one token and of several alternate, and padding names no sequence."""
    heads, lengths, slots, device = HEADS[2], [1, 66, 1, 3], [4, 0, 6, 2], kind[0]
    bounds = [*pairwise([0, 1, 67, 68, 71])]
    given = inputs(sum(lengths) + 2, heads, kind[1], device=device)
    decodes = Decodes(indices([4, 6, -1], device), indices([0, 67, 0], device))
    prefills = Prefills(
        starts=indices([1, 68, 0], device),
        ends=indices([67, 71, 0], device),
        slots=indices([0, 2, -1], device),
        chunks=indices([[0, 1], [0, 65], [1, 68], [-1, 0]], device),
        first_chunks=indices([0, 2, 3, 3], device),
        saves=indices([5, -1, -1, -1], device),
    )
    loras = adapted(given.qkv, 68), adapted(given.ba, 68)

    def run(states, last, parts, lora_qkv, lora_ba):
        y = torch.full_like(given.qkv, torch.nan)
        o = y.new_full((len(y), heads.value_heads, heads.value_dim), torch.nan)
        for kind, (convolve, rule) in {
            Decodes: (operators.decode_convolution, operators.decode_delta_rule),
            Prefills: (operators.prefill_convolution, operators.prefill_delta_rule),
        }.items():
            for part in parts:
                if isinstance(part, kind):
                    convolve(given.qkv, given.weight, last, part, lora_qkv, y)
                    rule(y, given.ba, given.decay, states, part, heads, lora_ba, o)
        return y, o

    states, last = given.states.clone(), given.last_inputs.clone()
    y, o = run(states, last, [decodes, prefills], *loras)
    assert y[71:].isnan().all()
    assert o[71:].isnan().all()
    for slot, (start, end) in zip(slots, bounds, strict=True):
        own, own_last = given.states.clone(), given.last_inputs.clone()
        if end - start == 1:
            alone = Decodes(indices([slot], device), indices([start], device))
        else:
            alone = Prefills.of([end - start], [slot], device)
            alone = alone._replace(starts=alone.starts + start, ends=alone.ends + start)
            alone.chunks[:, 1] += start
        of_y, of_o = run(own, own_last, [alone], *loras)
        assert torch.equal(y[start:end], of_y[start:end])
        assert torch.equal(o[start:end], of_o[start:end])
        assert torch.equal(states[slot], own[slot])
        assert torch.equal(last[slot], own_last[slot])
    for untouched in (1, 3):
        assert torch.equal(states[untouched], given.states[untouched])
    assert not torch.equal(states[5], given.states[5])
