"""Gated delta net: the linear attention of Qwen 3.5, with a causal convolution before it.

The convolution is depthwise and causal, with SiLU: y[t] = silu(Σ_j w[j] · x[t − width + 1 + j]),
before Mamba 2 (kernels/mamba) with a bias.

The gated delta rule keeps a state S [value_dim, key_dim] for each value head. A token with query q,
key k and value v, both q and k divided by their length, computes
    S ← exp(g) · S
    S ← S + β (v − S k) kᵀ
    o = S q / √key_dim
where g = −exp(a_log) · softplus(a + dt_bias) and β = sigmoid(b). This is the rule of Gated Delta
Networks (arXiv 2412.06464, section 3.1); prompts compute it in chunks of CHUNK tokens (section
3.3), to the same result. Each key head serves value_heads / key_heads neighbouring value heads.

A decode computes one token of each sequence, a prefill several; a step may have both, and calls the
two operators with the same `out`. Both update the sequences' states in place, in a pool that has a
slot for each sequence. Before a sequence's first token, the caller must set its slot to zeros or to
a copied state. No two sequences of a step may share a slot.

A decode with a ring reads the state, but writes it only in each (entries + 1)-th step: the tokens
since then are in the ring. With the ring's tokens i of keys k[i], corrections u[i] = β (v − S k)
and decays g[i], and D[i] = exp(the sum of g of the tokens after i, up to the current one), the
state before the current token's correction, and the current token's correction and output, are
    exp(g) S = exp(Σ g) S₀ + Σ D[i] u[i] k[i]ᵀ      S₀: the state in the pool
    u = β (v − exp(g) S k)
    o = (exp(g) S q + u (k · q)) / √key_dim
so neither S nor a new state is computed until the ring is full.

The torch functions compute in float32, or in float64 if the inputs are float64; `decode_recurrence`
and `prefill_recurrence` also serve Mamba 2. `fused` takes its kernels from `convolution` and
`delta_rule`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import add_lora_delta

CHUNK = 64
"""Number of a sequence's tokens that a prefill computes together, by matrix products."""
NORM_EPS = 1e-6
"""Number added to the squared length of a query or key before this is divided by its length.

The same as in flash-linear-attention.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers and sizes of the heads of a gated delta net.

    key_heads: number of key heads, and of query heads.
    value_heads: number of value heads, a multiple of key_heads; each value head has a state.
    key_dim, value_dim: size of a key (and query) head and of a value head; on CUDA powers of two,
        at least 16.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """key_heads, value_heads, key_dim and value_dim, as kernels take them."""
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of all queries, all keys and all values of a token."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Decay:
    """Trained weights that determine g, the logarithm of the factor by which a state decays.

    a_log [value_heads], dt_bias [value_heads]: float32
    """

    a_log: torch.Tensor
    dt_bias: torch.Tensor


class Decodes(NamedTuple):
    """Sequences of which a step computes one token.

    slots [sequences] int32: slot of each sequence in the pools of states; −1: no sequence, and
      nothing is read or written for it
    tokens [sequences] int32: index of each sequence's token; None: sequence i has token i

    All tensors are contiguous, on the device that runs the step.
    """

    slots: torch.Tensor
    tokens: torch.Tensor | None = None


class Prefills(NamedTuple):
    """Sequences of which a step computes several tokens, in chunks.

    starts, ends [sequences] int32: first token of each sequence, and the token after its last
    slots [sequences] int32: slot of each sequence in the pools of states; −1: no sequence
    chunks [chunks, 2] int32: for each chunk, its sequence and its first token; sequence −1: no
      chunk. A sequence's first chunk begins at the sequence's first token; all its chunks but the
      last have CHUNK tokens
    first_chunks [sequences + 1] int32: first chunk of each sequence, and the number of all chunks
    saves [chunks] int32: slot to which the state after each chunk is copied; −1: none. Only chunks
      of CHUNK tokens may have such a slot, and no sequence of the step may use it

    All tensors are contiguous, on the device that runs the step.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    chunks: torch.Tensor
    first_chunks: torch.Tensor
    saves: torch.Tensor

    @staticmethod
    def of(lengths: Sequence[int], slots: Sequence[int], device: torch.device) -> "Prefills":
        """Return the layout of sequences one after the other; no state is copied after a chunk.

        lengths: number of tokens of each sequence, at least 1.
        slots: slot of each sequence's state.
        """
        *starts, end = accumulate(lengths, initial=0)
        counts = [-(-length // CHUNK) for length in lengths]
        chunks = [
            (sequence, starts[sequence] + chunk * CHUNK)
            for sequence, count in enumerate(counts)
            for chunk in range(count)
        ]
        first_chunks, saves = list(accumulate(counts, initial=0)), [-1] * len(chunks)
        lists = (starts, [*starts[1:], end], list(slots), chunks, first_chunks, saves)
        return Prefills(*(torch.tensor(each, dtype=torch.int32, device=device) for each in lists))


class Ring(NamedTuple):
    """Last tokens of each slot's sequence, which are not yet added to the slot's state.

    keys [slots, key_heads, entries, key_dim] float32: keys, scaled to an L2 norm of 1
    corrections [slots, value_heads, entries, value_dim] float32: β (v − exp(g) S k) of each token,
      with the state S before it
    decays [slots, value_heads, entries] float32: g, the logarithm of each token's decay
    counts [slots, value_heads, value_dim] int8: number of the slot's tokens, 0 to entries. All
      values of a slot have the same count; each has its own copy, so that no two programs of a
      kernel share one

    The number of entries is 1 less than a power of 2. All tensors are contiguous.
    """

    keys: torch.Tensor
    corrections: torch.Tensor
    decays: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def empty(
        sizes: Sequence[int], heads: Heads, entries: int, dtype: torch.dtype, device: torch.device
    ) -> "Ring":
        """Return rings without tokens.

        sizes: leading dimensions of the tensors: (slots,) or (layers, slots).
        entries: number of tokens that a ring can hold.
        dtype: dtype of all tensors but the counts.
        """
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        return Ring(
            zeros(*sizes, heads.key_heads, entries, heads.key_dim),
            zeros(*sizes, heads.value_heads, entries, heads.value_dim),
            zeros(*sizes, heads.value_heads, entries),
            zeros(*sizes, heads.value_heads, heads.value_dim, dtype=torch.int8),
        )

    def layer(self, index: int) -> "Ring":
        """Return the rings of one layer, of tensors whose first dimension is layers."""
        return Ring(*(each[index] for each in self))


@by_device
def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    decodes: Decodes,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the convolution of one token of each sequence, and update its state in place.

    The result of token t is silu(Σ_j w[j] · x[t − width + 1 + j] + bias), for each channel.

    x [tokens, channels], each token contiguous: output of a linear layer
    weight [channels, width], contiguous: w
    states [slots, width − 1, channels] like x, each slot contiguous: the sequence's last inputs, in
      order; zeros before its first token
    lora: LoRA delta of x, whose rows have x's strides; added to x, and the sum rounded to x's dtype
    out [tokens, channels] like x, contiguous: tensor to write the result to; None: a new tensor
    bias [channels], contiguous: added to each sum; None: no bias
    → out; rows of tokens that belong to no sequence of the call are not written

    Sums are float32, rounded once.
    """
    tokens, slots = _decoded(decodes)
    y = x.new_zeros(x.shape) if out is None else out
    inputs = torch.cat([states[slots], summed(x, lora)[tokens].unsqueeze(1)], dim=1)
    y[tokens] = _convolved(inputs, weight, bias).squeeze(1)
    states[slots] = inputs[:, 1:]
    return y


@by_device
def prefill_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    prefills: Prefills,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the convolution of several tokens of each sequence, and update states in place.

    The result equals that of decode_convolution called token by token, even if a sequence's tokens
    are divided among several calls.

    prefills: tokens and state slot of each sequence
    All other arguments, and the result: as for decode_convolution
    """
    x = summed(x, lora)
    y = x.new_zeros(x.shape) if out is None else out
    for slot, start, end in _prefilled(prefills):
        inputs = torch.cat([states[slot], x[start:end]])  # [width - 1 + tokens, channels]
        y[start:end] = _convolved(inputs.unsqueeze(0), weight, bias).squeeze(0)
        states[slot] = inputs[end - start :]
    for first, slot in _saved(prefills):
        states[slot] = x[first + CHUNK - states.shape[1] : first + CHUNK]
    return y


@by_device
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
    """Compute the gated delta rule of one token of each sequence, and update its state in place.

    For each value head, S becomes exp(g) S + β (v − exp(g) S k) kᵀ, and the result is S q, with k
    scaled to length 1 and q to length 1 / √key_dim.

    qkv [tokens, sum(heads.widths)], each token contiguous: queries, keys and values, as the
      convolution returns them
    ba [tokens, 2 · value_heads], each token contiguous: b of each value head, then a of each, with
      β = sigmoid(b) and g = −exp(a_log) · softplus(a + dt_bias)
    states [slots, value_heads, value_dim, key_dim], float32 or bfloat16, each slot contiguous: S of
      each value head, the transpose of the state that transformers and flash-linear-attention keep;
      zeros before the first token
    lora: LoRA delta of ba, whose rows have ba's strides; added to ba
    out [tokens, value_heads, value_dim] like qkv, contiguous: tensor to write the result to; None:
      a new tensor
    ring: last tokens of each slot, to which the token is added; a full ring's tokens are added to
      the state instead. None: each token is added to the state
    → out; rows of tokens that belong to no sequence of the call are not written

    Computed in float32, and rounded once.
    """
    o = empty_output(qkv, heads) if out is None else out
    operands = _operands(qkv, summed(ba, lora), decay, heads)
    decode_recurrence(operands, states, decodes, o, ring)
    return o


@by_device
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
    """Compute the gated delta rule of several tokens of each sequence; update states in place.

    The result equals that of decode_delta_rule called token by token, apart from rounding. Sums are
    float32. On CUDA, factors of matrix products are rounded to qkv's dtype; so is the copy of the
    states that they read.

    ring: tokens of each slot that decode_delta_rule has not added to the state; the prefill adds
      them first, and leaves no tokens in the rings of its sequences and copied states. None: all
      tokens are added to the states
    All other arguments and the result: as for decode_delta_rule
    """
    o = empty_output(qkv, heads) if out is None else out
    operands = _operands(qkv, summed(ba, lora), decay, heads)
    prefill_recurrence(operands, states, prefills, o, ring)
    return o


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
        own = slice(start, end)
        mixed, after = chunked_recurrence(operands.of(own), wide(states[slot]))
        states[slot] = after[-1].to(states.dtype)
        o[own] = (mixed if skip is None else mixed + skip[own]).to(o.dtype)
        behind |= zip(range(start, end, CHUNK), after, strict=True)
    for first, slot in _saved(prefills):
        states[slot] = behind[first].to(states.dtype)


def chunked_recurrence(
    operands: Operands, state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute a recurrence of one sequence by chunks of CHUNK tokens (arXiv 2412.06464, section
    3.3).

    state [value_heads, value_dim, key_dim]: state before the first token
    → outputs [tokens, value_heads, value_dim], and the state after each chunk; in the operands'
      dtype
    """
    o, states = torch.empty_like(operands.v), list[torch.Tensor]()
    for first in range(0, len(o), CHUNK):
        chunk = slice(first, first + CHUNK)
        state, mixed = _chunk(state, operands.of(chunk))
        o[chunk] = mixed.transpose(0, 1)
        states.append(state)
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
