"""Random operands of the gated delta net."""

from dataclasses import dataclass, replace

import torch

from lorikeet_engine.kernels.delta_net import Decay, Heads, Operands, _next_state

CPU = torch.device("cpu")
HEADS = [Heads(2, 2, 16, 16), Heads(2, 6, 16, 32), Heads(1, 2, 32, 16)]


@dataclass(frozen=True)
class Inputs:
    """Operands of the convolution and of the delta rule.

    qkv: input of either of them.
    """

    qkv: torch.Tensor
    ba: torch.Tensor
    decay: Decay
    weight: torch.Tensor
    states: torch.Tensor
    last_inputs: torch.Tensor

    def tokens(self, start: int, end: int) -> "Inputs":
        return replace(self, qkv=self.qkv[start:end].clone(), ba=self.ba[start:end].clone())


def inputs(
    tokens: int,
    heads: Heads,
    dtype: torch.dtype,
    slots: int = 7,
    width: int = 4,
    device: torch.device = CPU,
    state_dtype: torch.dtype | None = None,
) -> Inputs:
    """Draw operands with a seed made of their sizes; states remember from 1 to 1,000 tokens."""
    generator = torch.Generator().manual_seed(tokens + 1000 * heads.value_heads)
    gates = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, of)

    channels = sum(heads.widths)
    rates = torch.logspace(-3, 1.2, heads.value_heads, dtype=gates, device=device)
    return Inputs(
        qkv=draw(tokens, channels),
        ba=draw(tokens, 2 * heads.value_heads),
        decay=Decay(rates.log(), draw(heads.value_heads, of=gates)),
        weight=draw(channels, width),
        states=draw(
            slots, heads.value_heads, heads.value_dim, heads.key_dim, of=state_dtype or gates
        ),
        last_inputs=draw(slots, width - 1, channels),
    )


def recurrence(
    operands: Operands, starts: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a recurrence token by token (arXiv 2412.06464, section 3.1).

    starts [sequences + 1]: first token of each sequence, and the number of all tokens
    """
    o, states = torch.empty_like(operands.v), states.clone()
    starts, lengths = starts[:-1].long(), starts.diff()
    for position in range(int(lengths.max())):
        running = (lengths > position).nonzero().squeeze(1)
        at = starts[running] + position
        states[running], o[at] = _next_state(states[running], operands.of(at))
    return o, states
