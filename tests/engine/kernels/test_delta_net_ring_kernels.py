"""Kernels that keep tokens of the gated delta net in a ring equal the delta rule in float64."""

import pytest
import torch

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import CHUNK, Decodes, Heads, Prefills, Ring, fused
from tests.engine.interpreter import DEVICES, KINDS, slow
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.delta_net_inputs import HEADS, inputs
from tests.engine.kernels.test_delta_net_kernels import (
    REAL,
    adapted,
    assert_close,
    eps_of,
    indices,
    merged,
    strided,
    wide,
)
from tests.engine.pairs import pairs

reference = in_torch(delta_net)

CASES = [
    (HEADS[0], 1),
    (HEADS[1], 3),
    (HEADS[2], 7),
    (Heads(1, 1, 32, 64), 3),
]
STATES = (torch.float32, torch.bfloat16)


def ring_of(given, heads, entries):
    """An empty ring with NaN in its entries."""
    ring = Ring.empty([len(given.states)], heads, entries, torch.float32, given.states.device)
    for each in ring[:3]:
        each.fill_(torch.nan)
    return ring


class Decoder:
    """Steps of the kernels with a ring, and of the reference in float64 without one."""

    def __init__(self, kind, heads, entries, state_dtype=torch.float32, tokens=300):
        self.heads, self.device = heads, kind[0]
        self.given = inputs(tokens, heads, kind[1], device=kind[0], state_dtype=state_dtype)
        self.exact, self.used = wide(self.given), 0
        self.ring = ring_of(self.given, heads, entries)
        self.kept = self.given.states.clone()

    def step(self, where, tokens, adapters=False):
        """Results of the kernel and of the reference for the next tokens, zeros where no sequence
        has a token.
        """
        start, end = self.used, self.used + tokens
        self.used, part, exact = end, self.given.tokens(start, end), self.exact.tokens(start, end)
        name = "prefill_delta_rule" if isinstance(where, Prefills) else "decode_delta_rule"
        ba = strided(part.ba)
        lora = adapted(ba, tokens - 1) if adapters else None
        o = part.qkv.new_zeros(tokens, self.heads.value_heads, self.heads.value_dim)
        states = self.given.states
        getattr(fused, name)(
            strided(part.qkv), ba, part.decay, states, where, self.heads, lora, o, self.ring
        )
        want = getattr(reference, name)(
            exact.qkv, merged(ba.double(), lora), exact.decay, self.exact.states, where, self.heads
        )
        return o, want

    def decode(self, slots, adapters=False):
        """Decode a token of each slot; -1: none. Tokens are in reverse, behind one of no slot."""
        tokens = indices(range(len(slots), 0, -1), self.device)
        decodes = Decodes(indices(slots, self.device), tokens)
        return self.step(decodes, len(slots) + 1, adapters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "state_dtype"),
    [*pairs(CASES, STATES), *slow(*(((REAL, n), dtype) for n in (3, 7) for dtype in STATES))],
)
def test_decodes_equal_the_delta_rule_and_write_states_of_full_rings_only(kind, case, state_dtype):
    heads, entries = case
    decoder, counts = Decoder(kind, heads, entries, state_dtype), [0] * 7
    steps = [[5, -1, 2], [2, 5, 6], [6, -1, 5], *[[5, 2, 6]] * (entries + 2)]
    eps = 8 * eps_of(torch.float32) + 2 * eps_of(kind[1], state_dtype)
    for number, slots in enumerate(steps):
        before = decoder.given.states.clone()
        assert_close(*decoder.decode(slots, adapters=number % 2 == 1), eps)
        for slot in range(7):
            counts[slot] = (counts[slot] + (slot in slots)) % (entries + 1)
            written = slot in slots and not counts[slot]
            assert torch.equal(decoder.given.states[slot], before[slot]) != written
    held = decoder.ring.counts.flatten(1)
    assert (held == torch.tensor(counts, device=held.device)[:, None]).all()
    assert len(set(counts)) > 1, "the sequences are in step"
    assert torch.equal(decoder.given.states[[0, 1, 3, 4]], decoder.kept[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "entries"), CASES[:3])
def test_a_prefill_begins_with_the_tokens_in_the_ring_and_empties_it(kind, heads, entries):
    decoder = Decoder(kind, heads, entries)
    eps = 24 * eps_of(torch.float32) if kind[1] == torch.float32 else 5 * eps_of(kind[1])
    for slots in ([5], [5, 2], [2]):
        decoder.decode(slots)
    decoder.ring.counts[1] = entries  # of the sequence that had the slot before
    saves = indices([1, -1, -1, -1], decoder.device)
    prefills = Prefills.of([CHUNK + 2, 1, 9], [2, 5, 0], decoder.device)._replace(saves=saves)
    assert_close(*decoder.step(prefills, CHUNK + 12), eps)
    assert_close(decoder.given.states, decoder.exact.states, eps)
    assert not decoder.ring.counts.any()
    assert_close(*decoder.decode([1, 2, 5]), eps)
    assert torch.equal(decoder.given.states[[3, 4, 6]], decoder.kept[[3, 4, 6]])


@pytest.mark.parametrize("device", DEVICES)
def test_many_sequences_decode_with_several_tiles_of_a_program(device):
    """With few sequences, each program has one tile, as in the other tests."""
    decoder = Decoder((device, torch.float32), Heads(1, 2, 16, 64), 1)
    for slots in ([0, 1, 2], [3, -1, 4, 1, 0, 6, -1, 5], [6, 1, -1, -1, 0, 3, 2, 4]):
        assert_close(*decoder.decode(slots), 8 * eps_of(torch.float32))
    assert decoder.ring.counts[:, 0, 0].tolist() == [1, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_strong_decay_in_the_ring_makes_no_nan_and_costs_later_tokens_no_digits(device):
    """Logarithms of decays that are summed from the state on would lose those of weak decays."""
    decoder = Decoder((device, torch.float32), HEADS[0], 7)
    for given in (decoder.given, decoder.exact):
        given.ba[:2] = 1e4
    for _ in range(9):
        assert_close(*decoder.decode([4]), 8 * eps_of(torch.float32))
