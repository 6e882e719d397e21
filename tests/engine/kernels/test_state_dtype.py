"""Error of the delta rule by the dtype of its states, against float64."""

import math

import pytest
import torch

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import Decay, Decodes, Heads, Prefills, Ring
from tests.engine.kernels.definitions import in_torch

reference = in_torch(delta_net)

TOKENS, TAIL = 1024, 256
MEMORIES = (1, 10, 100, 1000)  # tokens in which a head's state fades by a factor e
HEADS = Heads(2, 4, 128, 128)


def decay(dtype):
    a_log = [-math.log(memory * math.log(2)) for memory in MEMORIES]
    return Decay(torch.tensor(a_log, dtype=dtype), torch.zeros(4, dtype=dtype))


@pytest.fixture(scope="module")
def operands():
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, sum(HEADS.widths), generator=draw, dtype=torch.float64)
    b = torch.randn(TOKENS, 4, generator=draw, dtype=torch.float64)
    return qkv, torch.cat([b, torch.zeros_like(b)], 1)


@pytest.fixture(scope="module")
def truth(operands):
    states = torch.zeros(1, 4, 128, 128, dtype=torch.float64)
    whole = Prefills.of([TOKENS], [0], torch.device("cpu"))
    qkv, ba = (each.clone() for each in operands)
    return reference.prefill_delta_rule(qkv, ba, decay(torch.float64), states, whole, HEADS)


def error_of_each_head(operands, truth, state_dtype, step, dtype=torch.float32, entries=None):
    """Compute the tokens in steps of `step` tokens; return the errors of the last ones.

    entries: number of tokens that the ring holds; None: there is no ring.
    """
    cpu = torch.device("cpu")
    ring = None if entries is None else Ring.empty([1], HEADS, entries, torch.float32, cpu)
    states, outputs = torch.zeros(1, 4, 128, 128, dtype=state_dtype), []
    decodes = Decodes(torch.zeros(1, dtype=torch.int32))
    layout = Prefills.of([step], [0], cpu)
    for start in range(0, TOKENS, step):
        qkv, ba = (each[start : start + step].to(dtype) for each in operands)
        run = (qkv, ba, decay(torch.float32), states)
        if step == 1:
            outputs.append(reference.decode_delta_rule(*run, decodes, HEADS, ring=ring))
        else:
            outputs.append(reference.prefill_delta_rule(*run, layout, HEADS, ring=ring))
    got, want = torch.cat(outputs).double()[-TAIL:], truth[-TAIL:]
    return ((got - want).square().mean((0, 2)) / want.square().mean((0, 2))).sqrt().tolist()


@pytest.mark.parametrize("step", [1, 256])
def test_states_in_float32_lose_nothing(operands, truth, step):
    assert max(error_of_each_head(operands, truth, torch.float32, step)) < 5e-6


def test_each_decode_rounds_a_state_in_bfloat16(operands, truth):
    errors = error_of_each_head(operands, truth, torch.bfloat16, 1, torch.bfloat16)
    assert errors == pytest.approx([0.0034, 0.0048, 0.011, 0.018], rel=0.35)
    exact = error_of_each_head(operands, truth, torch.float32, 1, torch.bfloat16)
    assert exact == pytest.approx([0.0034] * 4, rel=0.2)


def test_decodes_with_a_ring_round_a_state_in_bfloat16_only_when_the_ring_is_full(operands, truth):
    errors = error_of_each_head(operands, truth, torch.bfloat16, 1, torch.bfloat16, entries=3)
    assert errors == pytest.approx([0.0033, 0.0037, 0.0062, 0.0101], rel=0.15)


def test_a_ring_loses_nothing_of_states_in_float32(operands, truth):
    assert max(error_of_each_head(operands, truth, torch.float32, 1, entries=3)) < 5e-6


def test_prompts_round_a_state_in_bfloat16_once_a_step(operands, truth):
    assert max(error_of_each_head(operands, truth, torch.bfloat16, 256)) < 0.002
