"""Mamba 2's scan in pure torch, computed in float32, or in float64 if the inputs are float64.

See kernels.mamba for the operators' definitions.
"""

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.delta_net import Decodes, Heads, Prefills, Ring
from lorikeet_engine.kernels.delta_net.reference import (
    Operands,
    decode_recurrence,
    empty_output,
    prefill_recurrence,
    summed,
    wide,
)
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.mamba import Scan


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
    """Compute the scan of one token of each sequence, and update its state: see kernels.mamba."""
    y = empty_output(xbc, heads) if out is None else out
    operands, skip = scan_operands(xbc, summed(dt, lora), scan, heads)
    decode_recurrence(operands, states, decodes, y, ring, skip)
    return y


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
    """Compute the scan of several tokens of each sequence, and update states: see kernels.mamba."""
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
