"""Rotary embedding, norms of queries and keys, and writes into KV pages, in one Triton launch.

For norms over heads that several processes share, mean_squares is launched before it.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import QkNorm
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands

HEADS = 8  # of one program


def rotary_and_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor | None,
    slots: torch.Tensor,
    lora: LoraDelta | None = None,
    norm: QkNorm | None = None,
    scales: KvScales | None = None,
    *,
    interleaved: bool = False,
    spans_head: bool = False,
    keys_are_values: bool = False,
    query_gain: torch.Tensor | None = None,
) -> None:
    """Rotate queries in place, and write rotated keys, and values, into KV pages.

    See kernels.pointwise. Token t's key goes to layer_kv[0] and its value to layer_kv[1], both at
    slots[t] = page · page_size + offset. Nothing is written for slots[t] < 0.
    """
    tokens, total, head_dim = qkv.shape
    half, kv_heads, kv_dim, plane = head_dim // 2, 0, head_dim, 0
    if layer_kv is not None:
        kv_heads, kv_dim, plane = layer_kv.shape[3], layer_kv.shape[4], layer_kv.stride(0)
    if keys_are_values:
        total += kv_heads
    squares = None if norm is None else norm.mean_squares
    weights = (None, None, 0.0) if norm is None else (norm.query_weight, norm.key_weight, norm.eps)
    inverses = (None, None) if scales is None else (1.0 / scales.key, 1.0 / scales.value)
    whole = norm is not None and (len(norm.query_weight) != head_dim or squares is not None)
    block_heads = triton.next_power_of_2(total) if whole and squares is None else HEADS
    block_half = triton.next_power_of_2(half)
    _rotary_and_store_kv[(tokens, triton.cdiv(total, block_heads))](
        qkv, *operands(lora), *weights, squares, cos, sin, query_gain, layer_kv, *inverses, slots,
        qkv.stride(0), plane, total - 2 * kv_heads, kv_heads, half, kv_dim,
        cos.shape[1], interleaved, spans_head, keys_are_values, whole,
        norm is not None and norm.values, block_heads, block_half,
        num_warps=min(16, max(4, block_heads * block_half // 512)),
    )  # fmt: skip


def mean_squares(
    qkv: torch.Tensor, kv_heads: int, processes: int, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute each token's mean(q²) / processes and mean(k²) / processes: see kernels.pointwise."""
    tokens, total, head_dim = qkv.shape
    heads = total - 2 * kv_heads
    means = torch.empty(tokens, 4, dtype=torch.float32, device=qkv.device)
    block = triton.next_power_of_2(max(heads, kv_heads) * head_dim)
    _mean_squares[(tokens, 2)](
        qkv, *operands(lora), means, qkv.stride(0), heads * head_dim, kv_heads * head_dim,
        processes, block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return means


@triton.jit  # type: ignore[untyped-decorator]
def _mean_squares(
    qkv: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    means: tl.tensor,
    token_stride: tl.tensor,
    queries: tl.constexpr,
    keys: tl.constexpr,
    processes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the mean square of one token's queries, or of its keys, divided by `processes`.

    qkv: queries, keys and values of each token. processes: number of processes.
    means [tokens, 4]: result, the part of queries in column 0 and the part of keys in column 1.
    lora, adapted: LoRA delta of qkv, and its number of rows; None: no delta.
    token_stride: elements of qkv from token to token.
    queries, keys: elements of all queries, and of all keys, of a token.
    """
    token = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    width = tl.where(side == 0, queries, keys)
    columns = tl.arange(0, block)
    inside = columns < width
    at = token * token_stride + side * queries + columns
    x = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        x += lora_at(lora, adapted, token, at, inside)
    x = x.to(qkv.dtype.element_ty).to(tl.float32)  # rounded as before the norm
    tl.store(means + 4 * token + side, tl.sum(x * x, 0) / width / processes)
    tl.store(means + 4 * token + 2 + side, 0.0)


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
    """Load norm weights for some columns of a head, which is a query's or a key's.

    query_weight, key_weight: weights of the norms of queries and keys (QkNorm).
    head: index of the head in qkv. heads: number of query heads, which come first.
    column: indices of the columns in the head.
    width: elements between the weights of two heads; 0: all heads share their weights.
    inside: mask of what to load: if width is 0, the columns that a head has; otherwise the columns
        of heads that are queries or keys.
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
def round_to_fp8(x: tl.tensor) -> tl.tensor:
    """Round float32 to the nearest E4M3 number as to_fp8 (kernels/fp8_kv.py) does."""
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
    mean_squares: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_gain: tl.tensor,
    layer_kv: tl.tensor,
    key_inverse: tl.tensor,
    value_inverse: tl.tensor,
    slots: tl.tensor,
    token_stride: tl.tensor,
    plane: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    kv_dim: tl.constexpr,
    rotary_half: tl.constexpr,
    interleaved: tl.constexpr,
    spans_head: tl.constexpr,
    keys_are_values: tl.constexpr,
    whole: tl.constexpr,
    norms_values: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    """Normalise, rotate and store some heads of one token.

    qkv, cos, sin, query_gain, layer_kv, slots, interleaved, spans_head, keys_are_values: see
        kernels.pointwise.rotary_and_store_kv.
    lora, adapted: LoRA delta of qkv, and its number of rows; None: no delta.
    query_weight, key_weight: weights of the norms of queries and keys; None: no norm.
    eps: added to mean squares. mean_squares: those of queries and keys; None: computed here.
    whole: whether all heads together are normalised, instead of each head.
    norms_values: whether values are normalised, without a weight.
    block_heads: heads of the program.
    block_half: `half` rounded up to a power of two.
    key_inverse, value_inverse: 1 / scales of FP8 pages; None: pages are not FP8.
    plane: number of elements from a key in layer_kv to the value of the same token and head.
    kv_heads: number of key heads; 0 if there is no layer_kv.
    half, rotary_half: half of head_dim and of rotary_dim. kv_dim: width of a head in layer_kv.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    column = tl.arange(0, block_half)[None, :]
    inside = (head < heads + 2 * kv_heads) & (column < half)
    left, right = column, column + half  # columns of a pair in its head
    if interleaved:
        left = tl.where(column < rotary_half, 2 * column, column + rotary_half)
        right = tl.where(column < rotary_half, 2 * column + 1, column + half)
    elif (
        rotary_half != half and not spans_head
    ):  # columns that are not rotated follow, in pairs too
        left = tl.where(column < rotary_half, column, column + rotary_half)
        right = tl.where(column < rotary_half, column + rotary_half, column + half)
    source = head  # in qkv
    if keys_are_values:
        source = tl.where(head < heads + kv_heads, head, head - kv_heads)
    place = token * token_stride + source * (2 * half)
    first = tl.load(qkv + place + left, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + place + right, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        first += lora_at(lora, adapted, token, place + left, inside)
        second += lora_at(lora, adapted, token, place + right, inside)
    turns = inside & (head < heads + kv_heads)  # values are not rotated: their angle is 0
    if query_weight is not None:
        first = first.to(qkv.dtype.element_ty).to(tl.float32)
        second = second.to(qkv.dtype.element_ty).to(tl.float32)
        squares = tl.sum(first * first + second * second, 1)[:, None]
        if mean_squares is not None:
            of_queries = tl.load(mean_squares + 4 * token)
            of_keys = tl.load(mean_squares + 4 * token + 1)
            squares = tl.where(head < heads, of_queries, of_keys) * (2 * half)
        elif whole:
            of_queries = tl.sum(tl.where(head < heads, squares, 0.0), 0)[None, :] / heads
            of_keys = tl.where((head >= heads) & (head < heads + kv_heads), squares, 0.0)
            of_keys = tl.sum(of_keys, 0)[None, :] / kv_heads
            squares = tl.where(head < heads, of_queries, of_keys)
        scale = 1.0 / tl.sqrt(squares / (2 * half) + eps)
        weighed = turns if whole else column < half
        width: tl.constexpr = 2 * half if whole else 0
        low = _weight(query_weight, key_weight, head, left, weighed, heads, width)
        high = _weight(query_weight, key_weight, head, right, weighed, heads, width)
        normed = turns
        if norms_values:
            normed = inside
            low = tl.where(head < heads + kv_heads, low, 1.0)
            high = tl.where(head < heads + kv_heads, high, 1.0)
        first = tl.where(normed, (first * scale * low).to(qkv.dtype.element_ty), first)
        second = tl.where(normed, (second * scale * high).to(qkv.dtype.element_ty), second)
    turns = turns & (column < rotary_half)
    c = tl.load(cos + token * rotary_half + column, mask=turns, other=1.0)
    s = tl.load(sin + token * rotary_half + column, mask=turns, other=0.0)
    low = (first * c - second * s).to(qkv.dtype.element_ty)
    high = (second * c + first * s).to(qkv.dtype.element_ty)

    query = inside & (head < heads)
    if query_gain is not None:
        gain = tl.where(head < heads, tl.load(query_gain + token), 1.0)
        low = (low.to(tl.float32) * gain).to(qkv.dtype.element_ty)
        high = (high.to(tl.float32) * gain).to(qkv.dtype.element_ty)
    tl.store(qkv + place + left, low, mask=query)
    tl.store(qkv + place + right, high, mask=query)
    if layer_kv is not None:
        slot = tl.load(slots + token)
        stored = inside & (head >= heads) & (slot >= 0)
        kv_head = (head - heads) % kv_heads
        value = (head >= heads + kv_heads).to(tl.int64)
        target = layer_kv + value * plane + (slot * kv_heads + kv_head) * kv_dim
        if key_inverse is not None:
            inverse = tl.where(head < heads + kv_heads, key_inverse, value_inverse)
            low = round_to_fp8(low.to(tl.float32) * inverse)
            high = round_to_fp8(high.to(tl.float32) * inverse)
        tl.store(target + left, low, mask=stored)
        tl.store(target + right, high, mask=stored)
