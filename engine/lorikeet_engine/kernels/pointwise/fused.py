"""The pointwise operators in Triton: one launch each, every tensor read and written once.

`lora`, what adapters add to the product that an operator reads, is added first, in float32.
kernels/pointwise/__init__.py passes every call on CUDA on to here; it has the dtypes, too.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import LARGEST, LEAST_SCALE, Activations, Fp8Rows
from lorikeet_engine.kernels.fp8.fused import empty_rows, store_rounded
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.lora.expand_silu import expand_silu_and_mul
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.kernels.pointwise import QkNorm

HEADS = 8  # taken by one program
COLUMNS = 1024  # gated by one program


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Set x to x + scale · (delta + lora); returns x / sqrt(mean(x²) + eps) · weight, or x.

    In float32 inside. x, delta [tokens, width], weight [width] → like x. With delta_weight [width],
    delta + lora is normed so before. What is normed is rounded before, as in the reference.
    """
    return _launch_add_rms_norm(x, delta, weight, eps, lora, scale, delta_weight, None)


def add_rms_norm_fp8(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
) -> Activations:
    """Do what add_rms_norm does, and round each of its rows to FP8 in the same launch."""
    rounded = empty_rows(x)
    y = _launch_add_rms_norm(x, delta, weight, eps, lora, scale, delta_weight, rounded)
    return Activations(y, rounded)


def _launch_add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None,
    scale: float,
    delta_weight: torch.Tensor | None,
    rounded: Fp8Rows | None,
) -> torch.Tensor:
    tokens, width = x.shape
    y = None if weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    fp8 = (None, None) if rounded is None else (rounded.rows, rounded.scales)
    _add_rms_norm[(tokens,)](
        x, delta, *_operands(lora), delta_weight, weight, y, *fp8, eps, scale, width, block,
        LARGEST, LEAST_SCALE,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return x if y is None else y


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

    Of the first rotary_dim elements of each head's query and key a = x[i] and b =
    x[i + rotary_dim / 2], interleaved x[2i] and x[2i + 1], become a · cos − b · sin and
    b · cos + a · sin, after `norm` if there is one; the others stay. A token's key goes to
    layer_kv[0], its value to layer_kv[1], both to slots[token] = page · page_size + offset, to
    nowhere if that is below 0.
    qkv [tokens, heads + 2 · kv_heads, head_dim]: queries, keys, values;
    layer_kv [2, pages, page_size, kv_heads, head_dim], FP8 with scales, by which keys and values
    are divided, and else like qkv.
    """
    tokens, total, head_dim = qkv.shape
    kv_heads, half = layer_kv.shape[3], head_dim // 2
    weights = (None, None, 0.0) if norm is None else (norm.query_weight, norm.key_weight, norm.eps)
    inverses = (None, None) if scales is None else (1.0 / scales.key, 1.0 / scales.value)
    whole = norm is not None and len(norm.query_weight) != head_dim
    block_heads = triton.next_power_of_2(total) if whole else HEADS
    block_half = triton.next_power_of_2(half)
    _rotary_and_store_kv[(tokens, triton.cdiv(total, block_heads))](
        qkv, *_operands(lora), *weights, cos, sin, layer_kv, *inverses, slots,
        qkv.stride(0), layer_kv.stride(0), total - 2 * kv_heads, kv_heads, half, cos.shape[1],
        interleaved, whole, block_heads, block_half,
        num_warps=min(16, max(4, block_heads * block_half // 512)),
    )  # fmt: skip


def silu_and_mul(x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None) -> torch.Tensor:
    """silu(x[:, :width]) · x[:, width:] of x + lora [tokens, 2 · width] → [tokens, width].

    Rounded once. In a prefill expand_silu_and_mul expands the adapters' delta in the same launch.
    """
    if isinstance(lora, UnexpandedDelta):
        return expand_silu_and_mul(x, lora)
    tokens, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty((tokens, width))
    _silu_and_mul[(tokens, triton.cdiv(width, COLUMNS))](x, *_operands(lora), y, width, COLUMNS)
    return y


def _operands(lora: LoraDelta | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if lora is None else (lora.rows, lora.tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _lora_at(
    lora: tl.tensor, adapted: tl.tensor, token: tl.tensor, at: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """What adapters add at these places of a token's row: 0 for a token without one."""
    # compared at every place: the interpreter takes no scalar into a mask
    inside = inside & (tl.zeros_like(at) + token < tl.load(adapted))
    return tl.load(lora + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_normed(
    x: tl.tensor, weight: tl.tensor, columns: tl.tensor, eps: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """Norm a row of float32, which is 0 behind its width."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    return x * scale * tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    delta_weight: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    rounded_y: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    scale: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
) -> None:
    """Compute one token."""
    columns = tl.arange(0, block)
    inside = columns < width
    token = tl.program_id(0).to(tl.int64)
    at = token * width + columns
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    if delta_weight is None:
        total += scale * added
        if lora is not None:
            total += scale * _lora_at(lora, adapted, token, at, inside)
    else:
        if lora is not None:
            added += _lora_at(lora, adapted, token, at, inside)
        added = added.to(x.dtype.element_ty).to(tl.float32)
        added = _rms_normed(added, delta_weight, columns, eps, width)
        total += scale * added.to(x.dtype.element_ty).to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    tl.store(x + at, rounded, mask=inside)
    if weight is not None:
        normed = _rms_normed(rounded.to(tl.float32), weight, columns, eps, width)
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)
        if scales is not None:
            values = normed.to(y.dtype.element_ty).to(tl.float32)
            store_rounded(
                values, inside, columns, token, rounded_y, scales, width, largest, least_scale
            )


@triton.jit  # type: ignore[untyped-decorator]
def _weight(
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    head: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """The norm's weights for columns of a head: the queries' or the keys'.

    inside: whether there is a query or key, if each head has weights of its own, which lie `width`
    apart; with a width of 0 whether there is a column.
    """
    query, in_query, in_key = head < heads, inside, inside
    if width:
        in_query, in_key = inside & query, inside & (head >= heads)
        query_weight += head * width
        key_weight += (head - heads) * width
    of_query = tl.load(query_weight + column, mask=in_query, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column, mask=in_key, other=0.0).to(tl.float32)
    return tl.where(query, of_query, of_key)


@triton.jit  # type: ignore[untyped-decorator]
def _to_fp8(x: tl.tensor) -> tl.tensor:
    """Round float32 to E4M3, see to_fp8 (kernels/fp8_kv.py)."""
    kept = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return tl.where(tl.abs(x) < float("inf"), kept, float("nan")).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["plane"])  # type: ignore[untyped-decorator]
def _rotary_and_store_kv(
    qkv: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    layer_kv: tl.tensor,
    key_inverse: tl.tensor,
    value_inverse: tl.tensor,
    slots: tl.tensor,
    token_stride: tl.tensor,
    plane: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    rotary_half: tl.constexpr,
    interleaved: tl.constexpr,
    whole: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    """Norm, rotate and store heads of one token; layer_kv's values lie `plane` behind its keys."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    column = tl.arange(0, block_half)[None, :]
    inside = (head < heads + 2 * kv_heads) & (column < half)
    left, right = column, column + half  # where a pair stands in its head
    if interleaved:
        left = tl.where(column < rotary_half, 2 * column, column + rotary_half)
        right = tl.where(column < rotary_half, 2 * column + 1, column + half)
    elif rotary_half != half:  # behind those that turn come the others, in pairs like them
        left = tl.where(column < rotary_half, column, column + rotary_half)
        right = tl.where(column < rotary_half, column + rotary_half, column + half)
    place = token * token_stride + head * (2 * half)
    first = tl.load(qkv + place + left, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + place + right, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        first += _lora_at(lora, adapted, token, place + left, inside)
        second += _lora_at(lora, adapted, token, place + right, inside)
    turns = inside & (head < heads + kv_heads)  # values do not: their angle is 0
    if query_weight is not None:
        first = first.to(qkv.dtype.element_ty).to(tl.float32)
        second = second.to(qkv.dtype.element_ty).to(tl.float32)
        squares = tl.sum(first * first + second * second, 1)[:, None]
        if whole:
            of_queries = tl.sum(tl.where(head < heads, squares, 0.0), 0)[None, :] / heads
            of_keys = tl.where((head >= heads) & (head < heads + kv_heads), squares, 0.0)
            of_keys = tl.sum(of_keys, 0)[None, :] / kv_heads
            squares = tl.where(head < heads, of_queries, of_keys)
        scale = 1.0 / tl.sqrt(squares / (2 * half) + eps)
        weighed = turns if whole else column < half
        width: tl.constexpr = 2 * half if whole else 0
        low = _weight(query_weight, key_weight, head, left, weighed, heads, width)
        high = _weight(query_weight, key_weight, head, right, weighed, heads, width)
        first = tl.where(turns, (first * scale * low).to(qkv.dtype.element_ty), first)
        second = tl.where(turns, (second * scale * high).to(qkv.dtype.element_ty), second)
    turns = turns & (column < rotary_half)
    c = tl.load(cos + token * rotary_half + column, mask=turns, other=1.0)
    s = tl.load(sin + token * rotary_half + column, mask=turns, other=0.0)
    low = (first * c - second * s).to(qkv.dtype.element_ty)
    high = (second * c + first * s).to(qkv.dtype.element_ty)

    query = inside & (head < heads)
    tl.store(qkv + place + left, low, mask=query)
    tl.store(qkv + place + right, high, mask=query)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    stored = inside & (head >= heads)
    kv_head = (head - heads) % kv_heads
    value = (head >= heads + kv_heads).to(tl.int64)
    target = layer_kv + value * plane + (slot * kv_heads + kv_head) * (2 * half)
    if key_inverse is not None:
        inverse = tl.where(head < heads + kv_heads, key_inverse, value_inverse)
        low = _to_fp8(low.to(tl.float32) * inverse)
        high = _to_fp8(high.to(tl.float32) * inverse)
    tl.store(target + left, low, mask=stored)
    tl.store(target + right, high, mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    y: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = token * (2 * width) + columns
    gates = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        gates += _lora_at(lora, adapted, token, at, inside)
        values += _lora_at(lora, adapted, token, at + width, inside)
    out = gates / (1.0 + tl.exp(-gates)) * values
    tl.store(y + token * width + columns, out.to(y.dtype.element_ty), mask=inside)
