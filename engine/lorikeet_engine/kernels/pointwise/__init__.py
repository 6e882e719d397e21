"""What stands between a decoder's products: norms, rotary embedding, KV pages, SiLU.

Where an operator reads a product, `lora` is what adapters add to it: it is added before anything
else, by the kernels in float32. None adds nothing.

`reference` is the equation in torch and runs on the CPU; `fused` holds Triton kernels with the
same signatures.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta

__all__ = ["QkNorm", "add_rms_norm", "rotary_and_store_kv", "silu_and_mul"]


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms of each head's query and key, with weights [head_dim] like what they norm."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Add scale · delta to x in place; returns x / sqrt(mean(x²) + eps) · weight.

    Both in float32 inside. x, delta [tokens, width], dense; weight [width] → like x. lora belongs
    to delta.
    """
    y: torch.Tensor = _operators(x.device.type).add_rms_norm(x, delta, weight, eps, lora, scale)
    return y


def rotary_and_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor,
    slots: torch.Tensor,
    lora: LoraDelta | None = None,
    norm: QkNorm | None = None,
    scales: KvScales | None = None,
) -> None:
    """Turn the queries in place; put the turned keys, and the values, into their pages.

    Of a head's first rotary_dim elements each pair (x[i], x[i + rotary_dim / 2]) turns by its
    position's angle, in float32; the others stay. With norm, each head's query and key x is
    x / sqrt(mean(x²) + eps) · weight before, in float32 inside; it is rounded to qkv's dtype before
    the norm and after it.
    qkv [tokens, heads + 2 · kv_heads, head_dim], dense in a token: queries, keys, values;
    cos, sin [tokens, rotary_dim / 2] float32, dense, and of no columns where nothing turns;
    layer_kv [2, pages, page_size, kv_heads, head_dim] like qkv, contiguous; slots [tokens] int64:
    page · page_size + offset, −1 for no place. With scales, layer_kv is FP8, and what to_fp8
    (kernels/fp8_kv.py) makes of keys and values is stored. The keys in qkv are left undefined.
    """
    operators = _operators(qkv.device.type)
    operators.rotary_and_store_kv(qkv, cos, sin, layer_kv, slots, lora, norm, scales)


def silu_and_mul(x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None) -> torch.Tensor:
    """silu(x[:, :width]) · x[:, width:] of x [tokens, 2 · width], dense → [tokens, width]."""
    y: torch.Tensor = _operators(x.device.type).silu_and_mul(x, lora)
    return y


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.pointwise.{name}")
