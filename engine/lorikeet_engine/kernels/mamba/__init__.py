"""Mamba 2's scan (arXiv 2405.21060): the state space layer of Nemotron 3 and Granite 4.

A head with inputs x [value_dim] keeps a state S [value_dim, key_dim]. A token with B and C
[key_dim], which the head shares with the other heads of its group, and with the time step δ,
computes
    δ = clamp(softplus(dt + dt_bias), time_limits)      g = −exp(a_log) · δ
    S ← exp(g) · S + δ x Bᵀ
    y = S C + d · x
This is the delta rule's recurrence (kernels/delta_net) with queries C, keys B and values δ x, and
without its correction: so layouts of steps (Decodes, Prefills), states, rings and the convolution
before the scan are those of kernels/delta_net. What Mamba 2 calls groups are key heads there.
Prompts compute chunks of CHUNK tokens, in the form of section 6 of the paper.

The torch functions compute in float32, or in float64 if the inputs are float64.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.delta_net import (
    Decodes,
    Heads,
    Operands,
    Prefills,
    Ring,
    decode_recurrence,
    empty_output,
    prefill_recurrence,
    summed,
    wide,
)
from lorikeet_engine.kernels.lora.types import LoraDelta


@dataclass(frozen=True, slots=True)
class Scan:
    """Trained weights of Mamba 2's scan, and bounds of its time steps.

    a_log, dt_bias, d [value_heads] float32: weights of the decay, of the time step δ, and of the
        input x that is added to the output
    time_limits: smallest and largest time step δ
    """

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    time_limits: tuple[float, float]


def fits_gpu(heads: Heads) -> bool:
    """Whether the scan has CUDA kernels for these heads.

    It has, if key_dim is a power of two of at least 16, and value_dim a multiple of 16.
    """
    return heads.key_dim >= 16 and heads.key_dim.bit_count() == 1 and heads.value_dim % 16 == 0


@by_device
def decode_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    scan: Scan,
    states: torch.Tensor,
    decodes: Decodes,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute Mamba 2's scan of one token of each sequence, and update its state in place.

    For each head, S becomes exp(g) S + δ x Bᵀ, with the time step δ and g = −exp(a_log) δ; the
    result is S C + d x.

    xbc [tokens, value_heads · value_dim + 2 · key_heads · key_dim], each token contiguous: x of all
      heads, B and C of all groups, as the convolution returns them
    dt [tokens, value_heads], each token contiguous: δ before dt_bias, softplus and time_limits
    states [slots, value_heads, value_dim, key_dim], float32 or bfloat16, each slot contiguous: S of
      each head; zeros before the first token
    lora: LoRA delta of dt, whose rows have dt's strides; added to dt
    out [tokens, value_heads, value_dim] like xbc, contiguous: tensor to write the result to; None:
      a new tensor
    ring: last tokens of each slot, to which the token is added; a full ring's tokens are added to
      the state instead. None: each token is added to the state
    → out; rows of tokens that belong to no sequence of the call are not written

    Computed in float32, and rounded once.
    """
    y = empty_output(xbc, heads) if out is None else out
    operands, skip = scan_operands(xbc, summed(dt, lora), scan, heads)
    decode_recurrence(operands, states, decodes, y, ring, skip)
    return y


@by_device
def prefill_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    scan: Scan,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute Mamba 2's scan of several tokens of each sequence; update states in place.

    The result equals that of decode_scan called token by token, apart from rounding. Sums are
    float32. On CUDA, factors of matrix products are rounded to xbc's dtype; so is the copy of the
    states that they read.

    ring: tokens of each slot that decode_scan has not added to the state; the prefill adds them
      first, and leaves no tokens in the rings of its sequences and copied states. None: all tokens
      are added to the states
    All other arguments and the result: as for decode_scan
    """
    y = empty_output(xbc, heads) if out is None else out
    operands, skip = scan_operands(xbc, summed(dt, lora), scan, heads)
    prefill_recurrence(operands, states, prefills, y, ring, skip)
    return y


def scan_operands(
    xbc: torch.Tensor, dt: torch.Tensor, scan: Scan, heads: Heads
) -> tuple[Operands, torch.Tensor]:
    """Compute the recurrence's operands, and d · x, from the arguments of decode_scan."""
    keys, _, values = heads.widths
    x, b, c = torch.split(wide(xbc), [values, keys, keys], dim=1)
    x = x.view(-1, heads.value_heads, heads.value_dim)
    group = heads.value_heads // heads.key_heads
    b, c = (
        each.view(-1, heads.key_heads, heads.key_dim).repeat_interleave(group, dim=1)
        for each in (b, c)
    )
    steps = F.softplus(wide(dt) + scan.dt_bias).clamp(*scan.time_limits)
    g = -scan.a_log.exp() * steps
    return Operands(c, b, steps.unsqueeze(2) * x, g, None), scan.d[:, None] * x
