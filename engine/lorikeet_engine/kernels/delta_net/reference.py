"""Gated delta net in pure torch, computed in float32, or in float64 if the inputs are float64.

See kernels.delta_net for the operators' definitions. `recurrence` and `chunked_recurrence` compute
the same recurrence token by token and chunk by chunk; Mamba 2 (kernels/mamba) has it, too.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.delta_net import (
    CHUNK,
    NORM_EPS,
    Decay,
    Decodes,
    Heads,
    Prefills,
    Ring,
)
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.reference import add_lora_delta


class Operands(NamedTuple):
    """Operands of the recurrence S ← exp(g) S + u kᵀ, o = S q, of a state S, for some tokens.

    u = β (v − exp(g) S k), or u = v if beta is None.

    q, k [tokens, value_heads, key_dim]
    v [tokens, value_heads, value_dim]
    g, beta [tokens, value_heads]: logarithm of each token's decay, and β
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None

    def of(self, tokens: slice | torch.Tensor) -> "Operands":
        """Return the operands of some of the tokens."""
        q, k, v, g, beta = self
        beta = None if beta is None else beta[tokens]
        return Operands(q[tokens], k[tokens], v[tokens], g[tokens], beta)


def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    decodes: Decodes,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve one token of each sequence, and update its state: see kernels.delta_net."""
    tokens, slots = _decoded(decodes)
    y = x.new_zeros(x.shape) if out is None else out
    inputs = torch.cat([states[slots], summed(x, lora)[tokens].unsqueeze(1)], dim=1)
    y[tokens] = _convolved(inputs, weight, bias).squeeze(1)
    states[slots] = inputs[:, 1:]
    return y


def prefill_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    prefills: Prefills,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve several tokens of each sequence, and update states: see kernels.delta_net."""
    x = summed(x, lora)
    y = x.new_zeros(x.shape) if out is None else out
    for slot, start, end in _prefilled(prefills):
        inputs = torch.cat([states[slot], x[start:end]])  # [width - 1 + tokens, channels]
        y[start:end] = _convolved(inputs.unsqueeze(0), weight, bias).squeeze(0)
        states[slot] = inputs[end - start :]
    for first, slot in _saved(prefills):
        states[slot] = x[first + CHUNK - states.shape[1] : first + CHUNK]
    return y


def decode_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    decodes: Decodes,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of one token of each sequence: see kernels.delta_net."""
    o = empty_output(qkv, heads) if out is None else out
    operands = _operands(qkv, summed(ba, lora), decay, heads)
    decode_recurrence(operands, states, decodes, o, ring)
    return o


def prefill_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of several tokens of each sequence: see kernels.delta_net."""
    o = empty_output(qkv, heads) if out is None else out
    operands = _operands(qkv, summed(ba, lora), decay, heads)
    prefill_recurrence(operands, states, prefills, o, ring)
    return o


def decode_recurrence(
    operands: Operands,
    states: torch.Tensor,
    decodes: Decodes,
    o: torch.Tensor,
    ring: Ring | None,
    skip: torch.Tensor | None = None,
) -> None:
    """Compute a recurrence for one token of each sequence; update states in place.

    operands: operands of all tokens.
    states [slots, value_heads, value_dim, key_dim]: state of each slot.
    ring: tokens of each slot not yet added to its state. The token joins them; if the ring is full,
        all are added to the state. None: the token is added to the state.
    o [tokens, value_heads, value_dim]: the outputs of these tokens are written here.
    skip: like o; added to the outputs before they are rounded. None: nothing is added.
    """
    tokens, slots = _decoded(decodes)
    mine = operands.of(tokens)
    if ring is None:
        after, mixed = _next_state(wide(states[slots]), mine)
        states[slots] = after.to(states.dtype)
    else:
        mixed = _next_in_ring(states, ring, slots, mine)
    o[tokens] = (mixed if skip is None else mixed + skip[tokens]).to(o.dtype)


def prefill_recurrence(
    operands: Operands,
    states: torch.Tensor,
    prefills: Prefills,
    o: torch.Tensor,
    ring: Ring | None,
    skip: torch.Tensor | None = None,
) -> None:
    """Compute a recurrence for several tokens of each sequence; update states in place.

    operands, states, o, skip: as for decode_recurrence.
    ring: tokens of each slot not yet added to its state, which are added first. None: all tokens
        are in the states.
    """
    if ring is not None:
        _empty_ring(states, ring, prefills.slots[prefills.slots >= 0].long())
        ring.counts[prefills.saves[prefills.saves >= 0].long()] = 0
    behind = dict[int, torch.Tensor]()
    for slot, start, end in _prefilled(prefills):
        starts, state = torch.tensor([0, end - start]), wide(states[slot : slot + 1])
        own, mine = slice(start, end), dict[int, torch.Tensor]()
        mixed, after = chunked_recurrence(operands.of(own), starts, state, mine)
        states[slot] = after[0].to(states.dtype)
        o[own] = (mixed if skip is None else mixed + skip[own]).to(o.dtype)
        behind |= {start + first: each for first, each in mine.items()}
    for first, slot in _saved(prefills):
        states[slot] = behind[first].to(states.dtype)


def recurrence(
    operands: Operands, starts: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a recurrence token by token (arXiv 2412.06464, section 3.1).

    starts [sequences + 1] int32: first token of each sequence, and the number of all tokens
    states [sequences, value_heads, value_dim, key_dim]: states before the first tokens
    → outputs [tokens, value_heads, value_dim], and states after the last tokens; both in the
      operands' dtype
    """
    o, states = torch.empty_like(operands.v), states.clone()
    starts, lengths = starts[:-1].long(), starts.diff()
    for position in range(int(lengths.max())):
        running = (lengths > position).nonzero().squeeze(1)
        at = starts[running] + position
        states[running], o[at] = _next_state(states[running], operands.of(at))
    return o, states


def chunked_recurrence(
    operands: Operands,
    starts: torch.Tensor,
    states: torch.Tensor,
    behind: dict[int, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a recurrence by chunks of CHUNK tokens (arXiv 2412.06464, section 3.3).

    starts [sequences + 1] int32, states: first tokens and states of the sequences
    behind: dictionary to which the state after each chunk is added, by the chunk's first token;
      None: states between chunks are not kept
    → outputs of all tokens, and states after the last tokens, as `recurrence` returns them
    """
    o, states = torch.empty_like(operands.v), states.clone()
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        for first in range(start, end, CHUNK):
            chunk = slice(first, min(first + CHUNK, end))
            states[sequence], mixed = _chunk(states[sequence], operands.of(chunk))
            o[chunk] = mixed.transpose(0, 1)
            if behind is not None:
                behind[first] = states[sequence].clone()
    return o, states


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute the convolution of each input after the first width − 1.

    inputs [sequences, width - 1 + tokens, channels] → [sequences, tokens, channels] like inputs
    """
    windows = wide(inputs).unfold(1, weight.shape[1], 1)  # [sequences, tokens, channels, width]
    sums = (windows * weight).sum(-1)
    return F.silu(sums if bias is None else sums + bias).to(inputs.dtype)


def empty_output(qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return zeros [tokens, value_heads, value_dim] for the outputs of all tokens."""
    return qkv.new_zeros(len(qkv), heads.value_heads, heads.value_dim)


def summed(x: torch.Tensor, lora: LoraDelta | None) -> torch.Tensor:
    """Return x plus its LoRA delta; x itself without one."""
    if lora is not None:
        x = x.clone()
        add_lora_delta(x, lora)
    return x


def _decoded(decodes: Decodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and the slots of the sequences, int64."""
    kept = decodes.slots >= 0
    tokens = kept.nonzero().squeeze(1) if decodes.tokens is None else decodes.tokens[kept].long()
    return tokens, decodes.slots[kept].long()


def _prefilled(prefills: Prefills) -> Iterator[tuple[int, int, int]]:
    """Yield the slot of each sequence, its first token and the token after its last."""
    columns = prefills.slots.tolist(), prefills.starts.tolist(), prefills.ends.tolist()
    rows = zip(*columns, strict=True)
    return (row for row in rows if row[0] >= 0)


def _saved(prefills: Prefills) -> Iterator[tuple[int, int]]:
    """Yield the first token of each chunk after which the state is copied, and the copy's slot."""
    rows = zip(prefills.chunks.tolist(), prefills.saves.tolist(), strict=True)
    return ((first, slot) for (_, first), slot in rows if slot >= 0)


def _operands(qkv: torch.Tensor, ba: torch.Tensor, decay: Decay, heads: Heads) -> Operands:
    """Compute the recurrence's operands from the arguments of prefill_delta_rule."""
    q, k, v = torch.split(wide(qkv), list(heads.widths), dim=1)
    q, k = (_unit(each.view(-1, heads.key_heads, heads.key_dim)) for each in (q, k))
    group = heads.value_heads // heads.key_heads
    q, k = (each.repeat_interleave(group, dim=1) for each in (q / heads.key_dim**0.5, k))
    b, a = wide(ba).chunk(2, dim=1)
    g = -decay.a_log.exp() * F.softplus(a + decay.dt_bias)
    return Operands(q, k, v.view(-1, heads.value_heads, heads.value_dim), g, b.sigmoid())


def _next_state(state: torch.Tensor, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states after one token of each sequence, and the token's outputs.

    state [sequences, value_heads, value_dim, key_dim]
    """
    q, k, v, g, beta = operands
    state = state * g.exp()[..., None, None]
    correction = v
    if beta is not None:
        correction = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + correction.unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state @ q.unsqueeze(-1)).squeeze(-1)


def _next_in_ring(
    states: torch.Tensor, ring: Ring, slots: torch.Tensor, operands: Operands
) -> torch.Tensor:
    """Return the outputs of one token of each slot, and add the token to the ring.

    A full ring's tokens are added to the slot's state, with the current one.

    states, ring: state of each slot, and its tokens that are not yet added to the state
    slots [sequences] int64: slots of the tokens
    """
    q, k, v, g, beta = operands
    keys, corrections, decays, counts = _held(ring, slots, v.shape[1])
    entries = decays.shape[2]
    after = decays @ torch.ones(entries, entries, dtype=g.dtype, device=g.device).tril(-1)
    fades = (g.unsqueeze(2) + after).exp().unsqueeze(2)  # of each correction until the token
    faded = (g + decays.sum(2)).exp().unsqueeze(2)  # of the state
    before = wide(states[slots])

    def read(x: torch.Tensor) -> torch.Tensor:
        """Return S x for keys or queries x, without computing S.

        S is the state after the ring's tokens and the current token's decay.
        """
        of_state = (before @ x.unsqueeze(3)).squeeze(3)
        similar = (keys @ x.unsqueeze(3)).mT
        return faded * of_state + ((fades * similar) @ corrections).squeeze(2)

    u = v if beta is None else beta.unsqueeze(2) * (v - read(k))
    o = read(q) + u * (k * q).sum(2, keepdim=True)
    added = u.unsqueeze(3) * k.unsqueeze(2)
    folded = faded.unsqueeze(3) * before + (fades.mT * corrections).mT @ keys + added
    full = counts == entries
    states[slots[full]] = folded[full].to(states.dtype)
    kept, index = slots[~full], counts[~full]
    group = v.shape[1] // ring.keys.shape[1]
    ring.keys[kept, :, index] = k[~full, ::group].to(ring.keys.dtype)
    ring.corrections[kept, :, index] = u[~full].to(ring.corrections.dtype)
    ring.decays[kept, :, index] = g[~full].to(ring.decays.dtype)
    ring.counts[slots] = torch.where(full, 0, counts + 1).to(torch.int8)[:, None, None]
    return o


def _empty_ring(states: torch.Tensor, ring: Ring, slots: torch.Tensor) -> None:
    """Add the tokens in the rings of some slots to their states, in order."""
    keys, corrections, decays, _ = _held(ring, slots, states.shape[1])
    state = wide(states[slots])
    for k, u, g in zip(keys.unbind(2), corrections.unbind(2), decays.unbind(2), strict=True):
        state = state * g.exp()[..., None, None] + u.unsqueeze(3) * k.unsqueeze(2)
    states[slots] = state.to(states.dtype)
    ring.counts[slots] = 0


def _held(
    ring: Ring, slots: torch.Tensor, value_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, corrections and decays in some slots' rings, and the number of tokens in each.

    Keys are repeated for all value heads that share a key head. Entries without a token are zeros:
    a token that changes no state.
    """
    group = value_heads // ring.keys.shape[1]
    keys, counts = ring.keys[slots].repeat_interleave(group, 1), ring.counts[slots, 0, 0].long()
    free = torch.arange(keys.shape[2], device=keys.device) >= counts[:, None]
    free = free[:, None, :]
    corrections, decays = ring.corrections[slots], ring.decays[slots].masked_fill(free, 0.0)
    keys, corrections = (each.masked_fill(free[..., None], 0.0) for each in (keys, corrections))
    return keys, corrections, decays, counts


def _chunk(state: torch.Tensor, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's state after a chunk, and the chunk's outputs by head.

    state [value_heads, value_dim, key_dim]
    """
    q, k, v, g = (each.transpose(0, 1) for each in operands[:4])
    beta = None if operands.beta is None else operands.beta.transpose(0, 1)
    total = g.cumsum(1)
    since = total.unsqueeze(2) - total.unsqueeze(1)  # of a row's token since a column's
    above = torch.ones_like(since, dtype=torch.bool).triu(1)
    decays = since.masked_fill(above, -torch.inf).exp()
    faded, corrections = total.exp().unsqueeze(2), v
    if beta is not None:
        system = beta.unsqueeze(2) * (k @ k.mT) * decays
        unknown = beta.unsqueeze(2) * (v - faded * (k @ state.mT))
        corrections = torch.linalg.solve_triangular(
            system, unknown, upper=False, unitriangular=True
        )
    o = faded * (q @ state.mT) + ((q @ k.mT) * decays) @ corrections
    left = decays[:, -1].unsqueeze(2)  # of each token's correction after the last token
    return state * faded[:, -1:] + (left * corrections).mT @ k, o


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32, or in float64 if it is float64."""
    return x if x.dtype == torch.float64 else x.float()
