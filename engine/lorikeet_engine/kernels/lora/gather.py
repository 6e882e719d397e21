"""Gather in Triton: shrink for embeddings, whose input is a token's id: a row of A, as it lies."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.tiles import Tiles, tile_at
from lorikeet_engine.kernels.lora.types import (
    LoraGroup,
    LoraWeights,
    UnexpandedDelta,
    check_group,
)


def gather(
    token_ids: torch.Tensor, weights: LoraWeights, tiles: Tiles, layer: int, group: LoraGroup
) -> UnexpandedDelta:
    """v[t, 0, 0, k] = A(t)[k, id of t], for the adapter of token t.

    token_ids [tokens] int64 → v [tokens, 1, 1, tiles.rank_stride] float32, undefined for tokens
    without an adapter, and from an adapter's own rank on. Raises ShapeError.
    """
    check_group(weights, group)
    v = torch.empty(
        (len(token_ids), 1, 1, tiles.rank_stride), dtype=torch.float32, device=token_ids.device
    )
    if v.numel() and len(tiles):
        _gather[(len(tiles),)](
            token_ids, weights.arena, weights.table, tiles.rows, v,
            layer, weights.table.stride(0), weights.table.stride(1), tiles.rank_stride,
            group.linears[0],
            block_tokens=triton.next_power_of_2(tiles.config.tokens),
            block_rank=16,
        )  # fmt: skip
    return UnexpandedDelta(v, weights, tiles, layer, group)


@triton.jit(do_not_specialize=["layer", "linear"])  # type: ignore[untyped-decorator]
def _gather(
    token_ids: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    v: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    rank_stride: tl.tensor,
    linear: tl.tensor,
    block_tokens: tl.constexpr,
    block_rank: tl.constexpr,
) -> None:
    """One tile of tokens, some ranks at a time; nothing for an adapter of rank 0."""
    slot, start, length = tile_at(tiles, tl.program_id(0))
    if (length == 0) | (slot < 0):
        return
    entry = table + slot * slot_stride + layer * layer_stride + linear * 3
    rank = tl.load(entry + 2).to(tl.int32)
    token, k = tl.arange(0, block_tokens), tl.arange(0, block_rank)
    row, real = (start + token).to(tl.int64), token < length
    ids = tl.load(token_ids + row, mask=real, other=0)
    a_rows = arena + tl.load(entry) + ids[:, None] * rank + k[None, :]
    v_rows = v + row[:, None] * rank_stride + k[None, :]
    for done in range(0, rank, block_rank):
        inside = real[:, None] & (k < rank - done)[None, :]
        values = tl.load(a_rows + done, mask=inside, other=0.0)
        tl.store(v_rows + done, values.to(tl.float32), mask=inside)
