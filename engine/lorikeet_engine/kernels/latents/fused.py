"""Operators of latent attention on CUDA: products by cuBLAS, all else in Triton.

The products of absorbed queries and of outputs are one batched product each, a matrix a head; its
result lies in place. The adapters' products of low rank are one launch each: a program reads some
tokens of one adapter and head, multiplies them to its ranks, and these on to the result.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.latents import AbsorbedWeight, LatentNorms
from lorikeet_engine.kernels.lora import composition
from lorikeet_engine.kernels.lora.composition import members_at, ranks_at
from lorikeet_engine.kernels.lora.tiles import tile_at
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraStep
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands
from lorikeet_engine.kernels.pointwise.rotary import round_to_fp8

_MOST_RANKS = 64  # of an adapter that one product multiplies
_HEADS = 8  # of one program that rotates queries


def store_latents(
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor,
    slots: torch.Tensor,
    norms: LatentNorms,
    lora: LoraDelta | None = None,
    scales: KvScales | None = None,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Normalise latents, rotate the shared keys, and write both into KV pages.

    See kernels.latents. One launch, of one program for each token.
    """
    query_rank = 0 if norms.queries is None else len(norms.queries)
    kv_rank, half = len(norms.keys), cos.shape[1]
    queries = y.new_empty(len(y), query_rank)
    blocks = [triton.next_power_of_2(max(1, width)) for width in (query_rank, kv_rank, half)]
    _store_latents[(len(y),)](
        y, *operands(lora), queries, norms.queries, norms.keys, norms.eps, cos, sin, layer_kv,
        None if scales is None else 1.0 / scales.key, slots,
        query_rank, kv_rank, half, interleaved, *blocks,
        num_warps=4,
    )  # fmt: skip
    return queries


def absorb_queries(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: AbsorbedWeight,
    lora: LoraDelta | None,
    step: LoraStep | None,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Compute the queries that attend to latents and shared keys: see kernels.latents.

    The adapters' part is rounded once for every 64 ranks.
    """
    tokens, heads, head_dim = q.shape
    kv_rank, half = weight.rows.shape[2], cos.shape[1]
    absorbed = q.new_empty(tokens, heads, kv_rank + head_dim - weight.plain)
    blocks = triton.next_power_of_2(weight.plain), triton.next_power_of_2(half)
    _turn_queries[(tokens, triton.cdiv(heads, _HEADS))](
        q, *operands(lora), absorbed, cos, sin,
        heads, weight.plain, kv_rank, half, interleaved, _HEADS, *blocks,
        num_warps=4,
    )  # fmt: skip
    plain, of_latents = q[..., : weight.plain], absorbed[..., :kv_rank]
    keys = weight.rows[:, : weight.plain]
    torch.bmm(plain.transpose(0, 1), keys, out=of_latents.transpose(0, 1))
    _add_adapters(plain, of_latents, weight, step, of_outputs=False)
    return absorbed


def expand_outputs(
    mixed: torch.Tensor, weight: AbsorbedWeight, step: LoraStep | None
) -> torch.Tensor:
    """Compute each head's output from its mix of latents: see kernels.latents.

    The adapters' part is rounded once for every 64 ranks.
    """
    values = weight.rows[:, weight.plain :]
    expanded = mixed.new_empty(*mixed.shape[:2], values.shape[1])
    torch.bmm(mixed.transpose(0, 1), values.mT, out=expanded.transpose(0, 1))
    _add_adapters(mixed, expanded, weight, step, of_outputs=True)
    return expanded


def _add_adapters(
    x: torch.Tensor,
    out: torch.Tensor,
    weight: AbsorbedWeight,
    step: LoraStep | None,
    *,
    of_outputs: bool,
) -> None:
    """Add Aᵀ·(B_k[h]ᵀ·x) to out in place, or B_v[h]·(A·x), for the adapter of each token.

    B_k[h] and B_v[h] are the rows of B that make head h's key and its value.

    x [tokens, heads, plain], out [tokens, heads, kv rank]; of_outputs: x [tokens, heads, kv rank],
      out [tokens, heads, values]
    """
    if step is None or len(step.tiles) == 0 or step.tiles.max_rank == 0:
        return
    tiles, weights = step.tiles, step.weights
    heads, width, kv_rank = weight.rows.shape
    ranks = min(_MOST_RANKS, triton.next_power_of_2(tiles.rank_stride))
    both = x.dtype, weights.arena.dtype
    _add_low_rank[(len(tiles), heads)](
        x, out, weights.arena, weights.table, tiles.rows, weight.layer,
        weights.table.stride(0), weights.table.stride(1), *x.stride()[:2], *out.stride()[:2],
        weight.group.linears[0], heads, width, weight.plain, kv_rank, x.shape[2], out.shape[2],
        *composition.operands(weights, tiles),
        of_outputs=of_outputs,
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        upcast=both[0] != both[1] or x.device.type == "cpu",
        precision="ieee" if torch.float32 in both else "tf32",
        block_tokens=max(16, tiles.config.tokens),
        block_rank=ranks,
        block=64,
        num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _store_latents(
    y: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    queries: tl.tensor,
    query_weight: tl.tensor,
    kv_weight: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    layer_kv: tl.tensor,
    inverse: tl.tensor,
    slots: tl.tensor,
    query_rank: tl.constexpr,
    kv_rank: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    query_block: tl.constexpr,
    kv_block: tl.constexpr,
    half_block: tl.constexpr,
) -> None:
    """Normalise both latents of one token, rotate its shared key, and store these.

    y: output of q_a_proj, latent of keys and values, shared key. queries: normalised first part.
    layer_kv, slots: KV pages, and place of each token in them (kernels.latents.store_latents).
    interleaved: rotate the pairs (2i, 2i + 1) of a key, instead of (i, i + half).
    lora, adapted: LoRA delta of y, and its number of rows; None: no delta.
    query_weight, kv_weight: weights of the norms of both latents.
    eps: added to mean squares.
    query_rank, kv_rank: widths of both latents.
    inverse: 1 / scale of FP8 pages; None: not FP8.
    half: half of the shared key's width.
    query_block, kv_block, half_block: widths rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    place = token * (query_rank + kv_rank + 2 * half)
    if query_weight is not None:
        column = tl.arange(0, query_block)
        inside = column < query_rank
        of_queries = _normed(
            y, lora, adapted, token, place, column, inside, query_weight, eps, query_rank
        )
        tl.store(queries + token * query_rank + column, of_queries, mask=inside)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    target = layer_kv + slot * (kv_rank + 2 * half)
    column = tl.arange(0, kv_block)
    inside = column < kv_rank
    place += query_rank
    normed = _normed(y, lora, adapted, token, place, column, inside, kv_weight, eps, kv_rank)
    if inverse is not None:
        normed = round_to_fp8(normed.to(tl.float32) * inverse)
    tl.store(target + column, normed, mask=inside)
    column = tl.arange(0, half_block)
    inside = column < half
    left, right = column, column + half
    if interleaved:
        left, right = 2 * column, 2 * column + 1
    place += kv_rank
    first = _product_at(y, lora, adapted, token, place + left, inside)
    second = _product_at(y, lora, adapted, token, place + right, inside)
    c = tl.load(cos + token * half + column, mask=inside, other=1.0)
    s = tl.load(sin + token * half + column, mask=inside, other=0.0)
    low = (first * c - second * s).to(y.dtype.element_ty)
    high = (second * c + first * s).to(y.dtype.element_ty)
    if inverse is not None:
        low = round_to_fp8(low.to(tl.float32) * inverse)
        high = round_to_fp8(high.to(tl.float32) * inverse)
    tl.store(target + kv_rank + left, low, mask=inside)
    tl.store(target + kv_rank + right, high, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _product_at(
    y: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    token: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Load some elements of a token's product with its LoRA delta, rounded once, as float32.

    y: the product.
    lora, adapted: its LoRA delta, and its number of rows; None: no delta.
    at, inside: offsets of the elements in y, and mask of those to load.
    """
    x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        x += lora_at(lora, adapted, token, at, inside)
    return x.to(y.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(
    y: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the RMS norm of a token's latent of this width, which begins at `place` of y.

    column, inside: indices of the latent's elements, and mask of those below its width.
    weight, eps: weight of the norm, and number added to the mean square.
    All other operands: see _product_at.
    """
    x = _product_at(y, lora, adapted, token, place + column, inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (x * scale * gain).to(y.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_queries(
    q: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    absorbed: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    heads: tl.constexpr,
    plain: tl.constexpr,
    kv_rank: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    block_heads: tl.constexpr,
    plain_block: tl.constexpr,
    half_block: tl.constexpr,
) -> None:
    """Write the rotated part of some heads' queries of one token, and add LoRA to the other part.

    q, absorbed, cos, sin, interleaved: argument and result of kernels.latents.absorb_queries.
    lora, adapted: LoRA delta of q, and its number of rows; None: no delta.
    plain: elements of a head's query that are not rotated.
    kv_rank: width of a latent.
    half: half of the width that is rotated.
    plain_block, half_block: widths rounded up to powers of two.
    block_heads: heads of the program.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    place = (token * heads + head) * (plain + 2 * half)
    if lora is not None:
        column = tl.arange(0, plain_block)[None, :]
        inside = (head < heads) & (column < plain)
        x = _product_at(q, lora, adapted, token, place + column, inside)
        tl.store(q + place + column, x.to(q.dtype.element_ty), mask=inside)
    column = tl.arange(0, half_block)[None, :]
    inside = (head < heads) & (column < half)
    left, right = column, column + half
    if interleaved:
        left, right = 2 * column, 2 * column + 1
    first = _product_at(q, lora, adapted, token, place + plain + left, inside)
    second = _product_at(q, lora, adapted, token, place + plain + right, inside)
    c = tl.load(cos + token * half + column, mask=column < half, other=1.0)
    s = tl.load(sin + token * half + column, mask=column < half, other=0.0)
    target = absorbed + (token * heads + head) * (kv_rank + 2 * half) + kv_rank
    tl.store(target + left, (first * c - second * s).to(q.dtype.element_ty), mask=inside)
    tl.store(target + right, (second * c + first * s).to(q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer", "linear"])  # type: ignore[untyped-decorator]
def _add_low_rank(
    x: tl.tensor,
    out: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    linear: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    plain: tl.constexpr,
    kv_rank: tl.constexpr,
    d_in: tl.constexpr,
    d_out: tl.constexpr,
    members: tl.tensor,
    member_weights: tl.tensor,
    of_outputs: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rank: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add both products of an adapter of kv_b_proj for one tile of tokens and one head.

    x, out: input, and tensor to add to. x_token, x_head, out_token, out_head: their strides.
        d_in, d_out: their widths.
    of_outputs: whether out gets B_v·(A·x) of attention outputs x, not Aᵀ·(B_kᵀ·x) of queries x.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    tiles: slot and tokens of each tile (Tiles.rows).
    slot_stride, layer_stride: strides of table.
    linear: index of kv_b_proj in the table. heads: number of heads. kv_rank: width of a latent.
    width, plain: outputs of kv_b_proj for a head, of which the first `plain` are its key.
    members, member_weights: adapters of each composition (a weighted sum of adapters), and their
        weights; None: a step without compositions.
    upcast: whether to multiply in float32.
    precision: precision of tl.dot for float32 factors.
    block_tokens: tokens of a tile.
    block_rank: ranks multiplied at once.
    block: columns of x and of out computed at once.
    """
    slot, start, length = tile_at(tiles, tl.program_id(0))
    if (length == 0) | (slot < 0):
        return
    head = tl.program_id(1)
    place = layer * layer_stride + linear * 3
    entry = table + slot * slot_stride + place
    token, k, column = tl.arange(0, block_tokens), tl.arange(0, block_rank), tl.arange(0, block)
    if members is not None:
        of_a, rank = members_at(table, members, member_weights, slot, slot_stride, place, True, 0)
        of_b, _ = members_at(table, members, member_weights, slot, slot_stride, place, True, 1)
    else:
        rank = tl.load(entry + 2).to(tl.int32)
        a = arena + tl.multiple_of(tl.load(entry), 16)
        b = arena + tl.multiple_of(tl.load(entry + 1), 16) + head * width
    row, real = (start + token).to(tl.int64), (token < length)[:, None]
    x_tile = x + row[:, None] * x_token + head * x_head + column[None, :]
    out_tile = out + row[:, None] * out_token + head * out_head + column[None, :]
    for done in range(0, rank, block_rank):
        ranks = (done + k).to(tl.int64)
        live = ranks < rank
        if members is not None:
            a_ranks = ranks_at(of_a, done + k, kv_rank)
            b_begins = ranks_at(of_b, done + k, heads * width)[0]
            a_rows = arena + a_ranks[0]
            b_rows = arena + b_begins + head * width
        else:
            a_rows = a + ranks * kv_rank
            b_rows = b + ranks * (heads * width)
        if of_outputs:
            first = a_rows
            second = b_rows + plain
        else:
            first = b_rows
            second = a_rows
        total = tl.zeros((block_tokens, block_rank), tl.float32)
        for begin in range(0, d_in, block):
            inside = begin + column < d_in
            inputs = tl.load(x_tile + begin, mask=real & inside[None, :], other=0.0)
            matrix = tl.load(
                first[None, :] + (begin + column)[:, None],
                mask=inside[:, None] & live[None, :],
                other=0.0,
            )
            if upcast:
                inputs = inputs.to(tl.float32)
                matrix = matrix.to(tl.float32)
            total = tl.dot(inputs, matrix, total, input_precision=precision)
        if members is not None:
            total *= a_ranks[1][None, :]
        shrunk = total.to(arena.dtype.element_ty)
        for begin in range(0, d_out, block):
            inside = begin + column < d_out
            matrix = tl.load(
                second[:, None] + (begin + column)[None, :],
                mask=live[:, None] & inside[None, :],
                other=0.0,
            )
            if upcast:
                change = tl.dot(
                    shrunk.to(tl.float32), matrix.to(tl.float32), input_precision=precision
                )
            else:
                change = tl.dot(shrunk, matrix, input_precision=precision)
            kept = real & inside[None, :]
            change += tl.load(out_tile + begin, mask=kept, other=0.0).to(tl.float32)
            tl.store(out_tile + begin, change.to(out.dtype.element_ty), mask=kept)
