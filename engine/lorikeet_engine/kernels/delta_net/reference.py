"""Gated delta net in pure torch, computed in float32, or in float64 if the inputs are float64.

See kernels.delta_net for the operators' definitions. `recurrent_delta_rule` and
`chunked_delta_rule` compute the same delta rule token by token and chunk by chunk.
"""

from itertools import pairwise

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.delta_net import CHUNK, NORM_EPS, Decay, Heads, Prefills
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.reference import add_lora_delta


def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """See kernels.delta_net."""
    add_lora_delta(x, lora)
    y, kept = torch.zeros_like(x), slots >= 0
    at = slots[kept].long()
    inputs = torch.cat([states[at], x[kept].unsqueeze(1)], dim=1)  # [sequences, width, channels]
    y[kept] = _convolved(inputs, weight).squeeze(1)
    states[at] = inputs[:, 1:]
    return y


def prefill_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    prefills: Prefills,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """See kernels.delta_net."""
    add_lora_delta(x, lora)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    bounds = pairwise(prefills.starts.tolist())
    for slot, (start, end) in zip(prefills.slots.tolist(), bounds, strict=True):
        inputs = torch.cat([states[slot], x[start:end]])  # [width - 1 + tokens, channels]
        y[start:end] = _convolved(inputs.unsqueeze(0), weight).squeeze(0)
        states[slot] = inputs[end - start :]
    for (_, first), slot in zip(prefills.chunks.tolist(), prefills.saves.tolist(), strict=True):
        if slot >= 0:
            states[slot] = x[first + CHUNK - states.shape[1] : first + CHUNK]
    return y


def decode_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    slots: torch.Tensor,
    heads: Heads,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """See kernels.delta_net."""
    kept = slots >= 0
    at = slots[kept].long()
    operands = (each[kept] for each in _operands(qkv, ba, decay, heads, lora))
    after, o = _next_state(_wide(states[at]), *operands)
    states[at] = after.to(states.dtype)
    out = qkv.new_zeros(len(qkv), heads.value_heads, heads.value_dim)
    out[kept] = o.to(out.dtype)
    return out


def prefill_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """See kernels.delta_net."""
    at = prefills.slots.long()
    operands = _operands(qkv, ba, decay, heads, lora)
    saved = dict[int, torch.Tensor]()
    o, after = chunked_delta_rule(*operands, prefills.starts, _wide(states[at]), saved)
    states[at] = after.to(states.dtype)
    for (_, first), slot in zip(prefills.chunks.tolist(), prefills.saves.tolist(), strict=True):
        if slot >= 0:
            states[slot] = saved[first].to(states.dtype)
    return o.to(qkv.dtype)


def recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule token by token (arXiv 2412.06464, section 3.1).

    q, k [tokens, value_heads, key_dim]: queries of length 1/√key_dim, and keys of length 1
    v [tokens, value_heads, value_dim]
    g, beta [tokens, value_heads]: logarithm of each token's decay, and β
    starts [sequences + 1] int32: first token of each sequence, and the number of all tokens
    states [sequences, value_heads, value_dim, key_dim]: states before the first tokens
    → outputs [tokens, value_heads, value_dim], and states after the last tokens; both in the
      operands' dtype
    """
    o, states = torch.empty_like(v), states.clone()
    starts, lengths = starts[:-1].long(), starts.diff()
    for position in range(int(lengths.max())):
        running = (lengths > position).nonzero().squeeze(1)
        at = starts[running] + position
        states[running], o[at] = _next_state(states[running], q[at], k[at], v[at], g[at], beta[at])
    return o, states


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    states: torch.Tensor,
    behind: dict[int, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute recurrent_delta_rule by chunks of CHUNK tokens (arXiv 2412.06464, section 3.3).

    behind: dictionary to which the state after each chunk is added, by the chunk's first token;
      None: states between chunks are not kept
    All other arguments, and the result: see recurrent_delta_rule
    """
    o, states = torch.empty_like(v), states.clone()
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        for first in range(start, end, CHUNK):
            chunk = slice(first, min(first + CHUNK, end))
            operands = (each[chunk].transpose(0, 1) for each in (q, k, v, g, beta))
            states[sequence], mixed = _chunk(states[sequence], *operands)
            o[chunk] = mixed.transpose(0, 1)
            if behind is not None:
                behind[first] = states[sequence].clone()
    return o, states


def _convolved(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the convolution of each input after the first width − 1.

    inputs [sequences, width - 1 + tokens, channels] → [sequences, tokens, channels] like inputs
    """
    windows = _wide(inputs).unfold(1, weight.shape[1], 1)  # [sequences, tokens, channels, width]
    return F.silu((windows * weight).sum(-1)).to(inputs.dtype)


def _operands(
    qkv: torch.Tensor, ba: torch.Tensor, decay: Decay, heads: Heads, lora: LoraDelta | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the operands q, k, v, g and β of recurrent_delta_rule from those of
    prefill_delta_rule.

    lora: LoRA delta of ba; None: no adapter.
    """
    add_lora_delta(ba, lora)
    q, k, v = torch.split(_wide(qkv), list(heads.widths), dim=1)
    q, k = (_unit(each.view(len(qkv), -1, heads.key_dim)) for each in (q, k))
    group = heads.value_heads // heads.key_heads
    q, k = (each.repeat_interleave(group, dim=1) for each in (q / heads.key_dim**0.5, k))
    b, a = _wide(ba).chunk(2, dim=1)
    g = -decay.a_log.exp() * F.softplus(a + decay.dt_bias)
    return q, k, v.view(len(qkv), -1, heads.value_dim), g, b.sigmoid()


def _next_state(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states after one token of each sequence, and the token's outputs.

    state [sequences, value_heads, value_dim, key_dim]
    q, k, v, g, beta: as for recurrent_delta_rule, with one token of each sequence
    """
    state = state * g.exp()[..., None, None]
    correction = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + correction.unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state @ q.unsqueeze(-1)).squeeze(-1)


def _chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's state after a chunk, and the chunk's outputs.

    A token's correction of the state depends on the corrections by all earlier tokens of the chunk.
    So a chunk's corrections are the solution of a triangular system of equations.

    state [value_heads, value_dim, key_dim]
    q, k [value_heads, tokens, key_dim], v [value_heads, tokens, value_dim]
    g, beta [value_heads, tokens]
    """
    total = g.cumsum(1)
    since = total.unsqueeze(2) - total.unsqueeze(1)  # of a row's token since a column's
    above = torch.ones_like(since, dtype=torch.bool).triu(1)
    decays = since.masked_fill(above, -torch.inf).exp()
    beta, faded = beta.unsqueeze(2), total.exp().unsqueeze(2)
    system = beta * (k @ k.mT) * decays
    unknown = beta * (v - faded * (k @ state.mT))
    corrections = torch.linalg.solve_triangular(system, unknown, upper=False, unitriangular=True)
    o = faded * (q @ state.mT) + ((q @ k.mT) * decays) @ corrections
    left = decays[:, -1].unsqueeze(2)  # of each token's correction after the last token
    return state * faded[:, -1:] + (left * corrections).mT @ k, o


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
