"""How the fused operators read what adapters add to the product before them."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.types import LoraDelta


def operands(lora: LoraDelta | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What lora_at reads: the rows and how many of them there are; None without adapters."""
    return (None, None) if lora is None else (lora.rows, lora.tokens)


@triton.jit  # type: ignore[untyped-decorator]
def lora_at(
    lora: tl.tensor, adapted: tl.tensor, token: tl.tensor, at: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """What adapters add at these places of a token's row: 0 for a token without one."""
    # compared at every place: the interpreter takes no scalar into a mask
    inside = inside & (tl.zeros_like(at) + token < tl.load(adapted))
    return tl.load(lora + at, mask=inside, other=0.0).to(tl.float32)
