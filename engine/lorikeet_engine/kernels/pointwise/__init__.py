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

from lorikeet_engine.kernels.fp8 import Activations
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.parallel.sums import RowExchange


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms of queries and keys, with weights like what they norm, or in float32.

    Of each head's, with weights [head_dim], or of all heads' together, with weights
    [heads · head_dim] and [kv_heads · head_dim]. mean_squares: what `mean_squares` gives of each
    token's, where these are not all of its heads.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    mean_squares: torch.Tensor | None = None


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
    exchange: RowExchange | None = None,
) -> torch.Tensor:
    """Add scale · delta to x in place; returns x / sqrt(mean(x²) + eps) · weight.

    Both in float32 inside. x, delta [tokens, width], dense; weight [width], which may be float32
    where x is not → like x. lora belongs to delta. With delta_weight [width], delta is
    delta / sqrt(mean(delta²) + eps) · delta_weight before; it is rounded to its dtype before the
    norm and after it. Without weight, returns x. With exchange, which takes delta (only on CUDA),
    the sum over ranks is in the place of delta and lora, which are this rank's.
    """
    operator = _operators(x.device.type).add_rms_norm
    y: torch.Tensor = operator(x, delta, weight, eps, lora, scale, delta_weight, exchange)
    return y


def add_rms_norm_fp8(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
    exchange: RowExchange | None = None,
) -> Activations:
    """Do what add_rms_norm does, and round each of its rows to FP8 as well."""
    operator = _operators(x.device.type).add_rms_norm_fp8
    y: Activations = operator(x, delta, weight, eps, lora, scale, delta_weight, exchange)
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
    *,
    interleaved: bool = False,
) -> None:
    """Turn the queries in place; put the turned keys, and the values, into their pages.

    Of a head's first rotary_dim elements each pair (x[i], x[i + rotary_dim / 2]), or interleaved
    (x[2i], x[2i + 1]), turns by its position's angle, in float32; the others stay. With norm,
    queries and keys x are x / sqrt(mean(x²) + eps) · weight before, in float32 inside, with the
    norm's mean_squares as the mean if it has them; they are rounded to qkv's dtype before the norm
    and after it.
    qkv [tokens, heads + 2 · kv_heads, head_dim], dense in a token: queries, keys, values;
    cos, sin [tokens, rotary_dim / 2] float32, dense, and of no columns where nothing turns;
    layer_kv [2, pages, page_size, kv_heads, head_dim or wider] like qkv, contiguous; slots [tokens]
    int64: page · page_size + offset, −1 for no place. With scales, layer_kv is FP8, and what to_fp8
    (kernels/fp8_kv.py) makes of keys and values is stored. The keys in qkv are left undefined.
    """
    operator = _operators(qkv.device.type).rotary_and_store_kv
    operator(qkv, cos, sin, layer_kv, slots, lora, norm, scales, interleaved=interleaved)


def mean_squares(
    qkv: torch.Tensor, kv_heads: int, processes: int, lora: LoraDelta | None = None
) -> torch.Tensor:
    """The mean of a token's queries squared, and of its keys, as the sum over processes has it.

    qkv [tokens, heads + 2 · kv_heads, head_dim], dense in a token, as rotary_and_store_kv gets it
    in one of the `processes`, each of which has as many heads → [tokens, 4] float32. The last two
    columns are 0: 16 bytes a token can be summed wherever sums are.
    """
    operator = _operators(qkv.device.type).mean_squares
    squares: torch.Tensor = operator(qkv, kv_heads, processes, lora)
    return squares


def act_and_mul(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> torch.Tensor:
    """silu(x[:, :width]) · x[:, width:] of x [tokens, 2 · width], dense → [tokens, width].

    gelu: with GELU, by its formula with tanh, in SiLU's place.
    """
    y: torch.Tensor = _operators(x.device.type).act_and_mul(x, lora, gelu=gelu)
    return y


def act_and_mul_fp8(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> Activations:
    """Do what act_and_mul does, and round each of its rows to FP8 as well."""
    y: Activations = _operators(x.device.type).act_and_mul_fp8(x, lora, gelu=gelu)
    return y


def add_delta(y: torch.Tensor, lora: LoraDelta) -> None:
    """Add to a product y [tokens, width], dense, what adapters add to it, in place."""
    _operators(y.device.type).add_delta(y, lora)


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.pointwise.{name}")
