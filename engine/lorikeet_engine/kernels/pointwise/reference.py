"""The pointwise operators in plain torch; the package says what each computes."""

import torch
from torch.nn import functional as F


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See the package."""
    x += delta
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See the package."""
    kv_heads = layer_kv.shape[3]
    turned = qkv[:, :-kv_heads]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = turned.float().chunk(2, dim=-1)
    turned.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    keys, values = layer_kv.flatten(1, 2)  # [pages * page_size, kv_heads, head_dim]
    keys.index_copy_(0, slots, qkv[:, -2 * kv_heads : -kv_heads])
    values.index_copy_(0, slots, qkv[:, -kv_heads:])


def gate(x: torch.Tensor) -> torch.Tensor:
    """See the package."""
    gates, values = x.chunk(2, dim=-1)
    return F.silu(gates) * values
