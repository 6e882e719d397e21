"""Random operands of Mamba 2's scan."""

import math
from dataclasses import dataclass, replace

import torch

from lorikeet_engine.kernels.delta_net import Heads
from lorikeet_engine.kernels.mamba import Scan

CPU = torch.device("cpu")
HEADS = [Heads(2, 2, 16, 16), Heads(2, 6, 16, 32), Heads(1, 4, 32, 16), Heads(1, 2, 16, 48)]


@dataclass(frozen=True)
class Inputs:
    """Operands of the scan."""

    xbc: torch.Tensor
    dt: torch.Tensor
    scan: Scan
    states: torch.Tensor

    def tokens(self, start: int, end: int) -> "Inputs":
        return replace(self, xbc=self.xbc[start:end].clone(), dt=self.dt[start:end].clone())


def inputs(
    tokens: int,
    heads: Heads,
    dtype: torch.dtype,
    slots: int = 7,
    device: torch.device = CPU,
    state_dtype: torch.dtype | None = None,
    time_limits: tuple[float, float] = (0.0, math.inf),
) -> Inputs:
    """Draw operands with a seed made of their sizes; states remember from 1 to 1,000 tokens."""
    generator = torch.Generator().manual_seed(tokens + 1000 * heads.value_heads)
    weights = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, of)

    count = heads.value_heads
    rates = torch.logspace(-3, 1.2, count, dtype=weights, device=device)
    scan = Scan(rates.log(), draw(count, of=weights), draw(count, of=weights), time_limits)
    return Inputs(
        xbc=draw(tokens, sum(heads.widths)),
        dt=draw(tokens, count),
        scan=scan,
        states=draw(slots, count, heads.value_dim, heads.key_dim, of=state_dtype or weights),
    )
