"""Decodes of the gated delta net that keep tokens in a ring equal those that write each state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import CHUNK, Decodes, Heads, Prefills, Ring
from tests.engine.kernels.definitions import in_torch
from tests.engine.kernels.delta_net_inputs import CPU, HEADS, inputs

reference = in_torch(delta_net)

SLOTS = 5
ENTRIES = [1, 3, 7]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
        st.tuples(st.just("decode"), st.just({0, 1, 2})),
        st.tuples(
            st.just("prefill"),
            st.dictionaries(st.integers(0, SLOTS - 1), st.integers(1, 30), min_size=1),
        ),
        st.tuples(st.just("save"), st.tuples(st.integers(0, 2), st.integers(3, SLOTS - 1))),
        st.tuples(st.just("copy"), st.permutations(range(SLOTS)).map(lambda each: each[:2])),
        st.tuples(st.just("begin"), st.integers(0, SLOTS - 1)),
    ),
    min_size=1,
    max_size=30,
)


class Pool:
    """States of some slots, in float64; each call draws the next tokens.

    entries: number of a ring's entries; None: each state is written.
    """

    def __init__(self, heads: Heads, entries: int | None) -> None:
        self.heads, self.states = heads, inputs(1, heads, torch.float64, SLOTS).states
        self.ring = None
        if entries is not None:
            self.ring = Ring.empty([SLOTS], heads, entries, torch.float64, CPU)
            for each in self.ring[:3]:
                each.fill_(torch.nan)
        self.drawn, self.used = inputs(5000, heads, torch.float64), 0

    def decode(self, slots: list[int]) -> torch.Tensor:
        padded = Decodes(torch.tensor([*slots, -1], dtype=torch.int32))
        return self.run(reference.decode_delta_rule, padded, len(slots) + 1)[:-1]

    def prefill(self, lengths: dict[int, int], saves: list[int] | None = None) -> torch.Tensor:
        prefills = Prefills.of([*lengths.values()], [*lengths], CPU)
        if saves is not None:
            prefills = prefills._replace(saves=torch.tensor(saves, dtype=torch.int32))
        return self.run(reference.prefill_delta_rule, prefills, sum(lengths.values()))

    def run(self, operator, where, tokens):
        drawn = self.drawn.tokens(self.used, self.used + tokens)
        self.used += tokens
        return operator(
            drawn.qkv, drawn.ba, drawn.decay, self.states, where, self.heads, ring=self.ring
        )

    def copy(self, source: int, slot: int) -> None:
        for each in (self.states, *(self.ring or ())):
            each[slot] = each[source]

    def begin(self, slot: int) -> None:
        for each in (self.states, *(self.ring or ())):
            each[slot] = 0


@settings(max_examples=20, deadline=None)
@given(steps=STEPS, heads=st.sampled_from(HEADS), entries=st.sampled_from(ENTRIES))
def test_any_order_of_steps_and_copies_computes_what_it_computes_without_a_ring(
    steps, heads, entries
):
    pools = Pool(heads, entries), Pool(heads, None)
    for name, about in [*steps, ("prefill", dict.fromkeys(range(SLOTS), 1))]:
        results = []
        for pool in pools:
            match name:
                case "decode":
                    results.append(pool.decode(sorted(about)))
                case "prefill":
                    results.append(pool.prefill(about))
                case "save":
                    slot, save = about
                    results.append(pool.prefill({slot: CHUNK + 3}, [save, -1]))
                case "copy":
                    pool.copy(*about)
                case "begin":
                    pool.begin(about)
        if results:
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pools[0].states, pools[1].states, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entries", ENTRIES)
def test_a_state_is_written_once_the_ring_is_full(entries):
    pool = Pool(HEADS[1], entries)
    plain, period = Pool(HEADS[1], None), entries + 1
    for step in range(1, 3 * period + 1):
        before = pool.states[2].clone()
        torch.testing.assert_close(pool.decode([2]), plain.decode([2]), rtol=1e-10, atol=1e-10)
        assert torch.equal(pool.states[2], before) == (step % period != 0)
        assert pool.ring.counts[2].unique().tolist() == [step % period]
        if step % period == 0:
            torch.testing.assert_close(pool.states, plain.states, rtol=1e-10, atol=1e-10)
    assert not pool.ring.counts[[0, 1, 3, 4]].any()


def test_sequences_fill_their_rings_at_different_steps():
    pool, plain = Pool(HEADS[0], 3), Pool(HEADS[0], None)
    for slots in ([0], [0, 4], [4, 0, 1], [0], [1, 4], [0, 1, 4]):
        torch.testing.assert_close(pool.decode(slots), plain.decode(slots), rtol=1e-10, atol=1e-10)
    assert pool.ring.counts[:, 0, 0].tolist() == [1, 3, 0, 0, 0]


def test_a_strong_decay_in_the_ring_makes_no_nan():
    """The logarithms of the decays sum to −10⁵, and later tokens keep all digits of theirs."""
    heads, entries = HEADS[0], 7
    drawn = inputs(12, heads, torch.float32)
    drawn.ba[::3] = 1e4
    results = []
    for ring in (Ring.empty([7], heads, entries, torch.float32, CPU), None):
        states, decodes = drawn.states.clone(), Decodes(torch.tensor([3], dtype=torch.int32))
        for token in range(12):
            part = drawn.tokens(token, token + 1)
            o = reference.decode_delta_rule(
                part.qkv, part.ba, part.decay, states, decodes, heads, ring=ring
            )
            results.append(o)
    torch.testing.assert_close(results[:12], results[12:], rtol=1e-4, atol=1e-5)
