"""Reads of a linear layer's LoRA delta in the fused operators."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.types import LoraDelta


def operands(lora: LoraDelta | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a LoRA delta in the form in which kernels take it: the operands `lora` and `adapted`.

    lora: rows of the delta. adapted: number of these rows.
    Both are None if there is no delta.
    """
    return (None, None) if lora is None else (lora.rows, lora.tokens)


@triton.jit  # type: ignore[untyped-decorator]
def lora_at(
    lora: tl.tensor, adapted: tl.tensor, token: tl.tensor, at: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """Load some elements of a token's LoRA delta; 0 for a token without an adapter.

    lora, adapted: the LoRA delta, and its number of rows.
    at: offsets of the elements in the delta.
    inside: mask of the elements to load.
    """
    # compared elementwise: the interpreter broadcasts no scalar into a mask
    inside = inside & (tl.zeros_like(at) + token < tl.load(adapted))
    return tl.load(lora + at, mask=inside, other=0.0).to(tl.float32)
