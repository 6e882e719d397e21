"""Operands that the Triton kernels of delta nets and of Mamba 2 (kernels/mamba) share."""

import torch

from lorikeet_engine.kernels.delta_net import Heads
from lorikeet_engine.kernels.lora.types import LoraDelta


def checked_output(
    x: torch.Tensor,
    gates: torch.Tensor,
    states: torch.Tensor,
    heads: Heads,
    lora: LoraDelta | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Assert the layout of a recurrence's operands; return the tensor to write the result to.

    x: output of the convolution: qkv of decode_delta_rule, xbc of decode_scan.
    gates: operand from which decays are computed: ba of decode_delta_rule, dt of decode_scan.
    lora: LoRA delta of `gates`.
    out: tensor of the caller for the result; None: a new tensor [tokens, value_heads, value_dim].
    """
    assert x.shape[1] == sum(heads.widths), x.shape
    assert (x.stride(1), gates.stride(1)) == (1, 1), (x.stride(), gates.stride())
    assert states.shape[1:] == (heads.value_heads, heads.value_dim, heads.key_dim), states.shape
    assert states[0].is_contiguous(), states.stride()
    assert lora is None or lora.rows.stride() == gates.stride(), lora.rows.stride()
    return x.new_empty((len(x), heads.value_heads, heads.value_dim)) if out is None else out
