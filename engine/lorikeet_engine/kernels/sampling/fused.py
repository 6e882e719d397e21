"""Draws of tokens in Triton, always in two launches.

The first launch reads the logits once, in chunks of each row: it adds up a chunk's weights, or, for
a row with top_k, takes the largest logit of each group of neighbours. The second launch has one
program for each row. The chunks' sums determine which chunk has the drawn token, so the program
reads only this chunk again. top_p costs one more pass over the row for each draw, rejected or not:
at most 1 / top_p draws on average.

For top_k, the k-th largest of the groups' largest logits is a lower bound of the row's k-th logit.
Few groups reach the bound, about k of 2,000; only these groups are read again.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import sampling
from lorikeet_engine.kernels.sampling.arithmetic import key_of, mix_of, weights_of

_GROUP = tl.constexpr(64)  # neighbouring tokens with one largest logit
_GROUPS = tl.constexpr(64)  # of a chunk
_CHUNK = tl.constexpr(_GROUP.value * _GROUPS.value)
_ROW, _UNIFORM = tl.constexpr(sampling.ROW), tl.constexpr(sampling.UNIFORM)
_SCALE, _TOP_K = tl.constexpr(sampling.SCALE), tl.constexpr(sampling.TOP_K)
_TOP_P, _LEAST = tl.constexpr(sampling.TOP_P), tl.constexpr(sampling.LEAST)
_FIELDS = tl.constexpr(sampling.DRAW_FIELDS)
_LOWEST = tl.constexpr(-(2**31))  # below the key of any number
_NEXT = tl.constexpr(sampling.NEXT_UNIFORM)
_NO_WEIGHT = tl.constexpr(-46.0)  # an exponent whose weight is 0, with a margin for rounding


def draw_tokens(
    logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, draws: torch.Tensor
) -> None:
    """Draw a token for each row of `draws`, and write it to `tokens`: see kernels.sampling."""
    rows, vocab = len(draws), logits.shape[1]
    chunks = triton.cdiv(vocab, _CHUNK.value)
    sums = logits.new_empty((rows, 2, chunks), dtype=torch.int64)
    largest = logits.new_empty((rows, chunks * _GROUPS.value), dtype=torch.float32)
    groups = torch.empty_like(largest, dtype=torch.int32)
    key_bits = 16 if logits.dtype == torch.bfloat16 else 32
    _sum_chunks[(rows, chunks)](
        logits, best, draws, sums, largest, vocab, chunks, num_warps=8, enable_fp_fusion=False
    )
    _draw[(rows,)](
        logits, best, draws, sums, largest, groups, tokens, vocab, chunks,
        triton.next_power_of_2(chunks), key_bits, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _field(draws: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """Load one column of `draws` for the row that this program computes."""
    return tl.load(draws + tl.program_id(0) * _FIELDS + column)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunks(
    logits: tl.tensor,
    best: tl.tensor,
    draws: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
) -> None:
    """Compute a chunk's sum of all weights, and its sum of the weights that min_p keeps.

    For a row with top_k, computes the largest logit of each of the chunk's groups of neighbouring
    columns instead.

    best: largest logit of each row of logits.
    draws: row of logits and parameters of each draw (kernels.sampling).
    sums: for each row the chunks' sums of kept weights, then of all weights; written here.
    largest: for each row the largest logit of each group; written here.
    """
    chunk, row = tl.program_id(1), _field(draws, _ROW)
    group = tl.arange(0, _GROUPS)
    column = chunk * _CHUNK + group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(logits + row * vocab + column, mask=column < vocab, other=-float("inf"))
    x = x.to(tl.float32)
    if _field(draws, _TOP_K) > 0:
        first = largest + tl.program_id(0) * (chunks * _GROUPS) + chunk * _GROUPS
        tl.store(first + group, tl.max(x, 1))
    else:
        scale = _field(draws, _SCALE).to(tl.int32).to(tl.float32, bitcast=True)
        weights = weights_of(x, tl.load(best + row).to(tl.float32), scale)
        kept = tl.where(weights >= _field(draws, _LEAST), weights, 0)
        at = sums + tl.program_id(0) * (2 * chunks) + chunk
        tl.store(at, tl.sum(tl.sum(kept, 1), 0))
        tl.store(at + chunks, tl.sum(tl.sum(weights, 1), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _chunk(
    row: tl.tensor,
    groups: tl.tensor,
    listed: tl.tensor,
    chunk: tl.tensor,
    vocab: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load a chunk of a row: its columns, and its float32 logits [_CHUNK].

    row: pointer to the row of logits.
    groups, listed: list of groups of neighbouring columns, and its length. The chunk
        consists of tokens of these groups; if the length is 0, of any tokens of the row.
    chunk: index of the chunk.
    """
    place = tl.arange(0, _CHUNK)
    group = chunk * _GROUPS + place // _GROUP
    inside = group >= 0
    if listed > 0:
        inside = group < listed
        group = tl.load(groups + group, mask=inside, other=0)
    column = group * _GROUP + place % _GROUP
    inside = inside & (column < vocab)
    x = tl.load(row + column, mask=inside, other=-float("inf"))
    return column, x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    row: tl.tensor,
    groups: tl.tensor,
    listed: tl.tensor,
    least: tl.tensor,
    vocab: tl.constexpr,
    bits: tl.constexpr,
) -> tl.tensor:
    """Count the tokens in the listed groups whose sort key is at least `least`.

    row: pointer to the row of logits.
    groups, listed: list of groups of neighbouring columns, and its length.
    bits: bits of sort keys (arithmetic.key_of): 16 for bfloat16 logits, else 32.
    """
    count = 0
    for chunk in range(tl.cdiv(listed, _GROUPS)):
        _, x = _chunk(row, groups, listed, chunk, vocab)
        count += tl.sum((key_of(x, bits) >= least.to(tl.int32)).to(tl.int32), 0)
    return count


@triton.jit  # type: ignore[untyped-decorator]
def _list_groups(
    largest: tl.tensor,
    groups: tl.tensor,
    top_k: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """List the groups of neighbouring columns that may contain one of the top_k tokens.

    largest: pointer to the largest logits of the row's groups. count: number of these groups.
    groups: memory to which the list is written.
    block: `count` rounded up to a power of two.
    low: sort key below which weights are 0.
    high: sort key above the sort keys of all tokens.
    bits: bits of sort keys (arithmetic.key_of): 16 for bfloat16 logits, else 32.
    → number of listed groups, and a lower bound of the top_k tokens' sort keys, at least `low`
    """
    group = tl.arange(0, block)
    x = tl.load(largest + group, mask=group < count, other=-float("inf"))
    keys = key_of(x, bits)
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= top_k:
            low = middle
        else:
            high = middle
    chosen = (keys >= low.to(tl.int32)) & (group < count)
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + places, group, mask=chosen)
    tl.debug_barrier()  # the program's other threads read the list
    return tl.sum(chosen.to(tl.int32), 0), low


@triton.jit  # type: ignore[untyped-decorator]
def _last_of_top_k(
    row: tl.tensor,
    groups: tl.tensor,
    listed: tl.tensor,
    top_k: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    vocab: tl.constexpr,
    bits: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the lowest sort key among the top_k tokens, and the column before which tokens with
    this key are among the top_k.

    row: pointer to the row of logits.
    groups, listed: list of groups of neighbouring columns, and its length.
    low, high: bounds of the sort key, the lower one inclusive.
    bits: bits of sort keys (arithmetic.key_of): 16 for bfloat16 logits, else 32.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        if _count(row, groups, listed, middle, vocab, bits) >= top_k:
            low = middle
        else:
            high = middle
    wanted = top_k - _count(row, groups, listed, low + 1, vocab, bits)
    seen, end = 0, 0
    for chunk in range(tl.cdiv(listed, _GROUPS)):
        column, x = _chunk(row, groups, listed, chunk, vocab)
        equal = (key_of(x, bits) == low.to(tl.int32)).to(tl.int32)
        kept = equal * (tl.cumsum(equal, 0) + seen <= wanted).to(tl.int32)
        end = tl.maximum(end, tl.max(kept * (column + 1), 0))
        seen += tl.sum(equal, 0)
    return low, end


@triton.jit  # type: ignore[untyped-decorator]
def _ranks_before(
    column: tl.tensor, x: tl.tensor, key: tl.tensor, end: tl.tensor, bits: tl.constexpr
) -> tl.tensor:
    """Return a mask of the tokens that rank better than a limit, the pair (`key`, `end`).

    A token ranks better if its sort key is larger, or equal at a column lower than `end`.

    column, x: columns and logits of the tokens.
    bits: bits of sort keys (arithmetic.key_of): 16 for bfloat16 logits, else 32.
    """
    own = key_of(x, bits)
    return (own > key) | ((own == key) & (column < end))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(
    logits: tl.tensor,
    best: tl.tensor,
    draws: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    groups: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    chunks_block: tl.constexpr,
    bits: tl.constexpr,
) -> None:
    """Draw one row's token. With top_p, tokens are drawn until one is accepted.

    A draw is from the tokens that rank better than (key, end), which is the limit of top_k for the
    first draw, and the last rejected token for later draws.

    best: largest logit of each row of logits. tokens: drawn token of each row; written here.
    draws: row of logits and parameters of each draw (kernels.sampling).
    sums, largest: results of _sum_chunks. groups: memory for _list_groups.
    bits: bits of sort keys (arithmetic.key_of): 16 for bfloat16 logits, else 32.
    chunks: number of chunks of a row; chunks_block: that, rounded up to a power of two.

    Variables: `listed`, number of groups with tokens of top_k, 0 without top_k; `used`, number of
        chunks that the listed groups fill, or all chunks; `part`, weights that may be drawn, by
        chunk.
    """
    at = _field(draws, _ROW)
    row, top = logits + at * vocab, tl.load(best + at).to(tl.float32)
    if tl.abs(top) < float("inf"):
        scale = _field(draws, _SCALE).to(tl.int32).to(tl.float32, bitcast=True)
        least, top_k = _field(draws, _LEAST), _field(draws, _TOP_K).to(tl.int32)
        top_p = _field(draws, _TOP_P).to(tl.float64, bitcast=True)
        uniform = _field(draws, _UNIFORM).to(tl.uint64, bitcast=True)
        each = tl.arange(0, chunks_block)
        listed, used = top_k * 0, top_k * 0 + chunks
        key, end = top_k * 0 + _LOWEST, top_k * 0
        if top_k > 0:
            first_group = tl.program_id(0) * (chunks * _GROUPS)
            # int64: two keys may differ by more than an int32
            low = key_of(top + _NO_WEIGHT / scale, bits).to(tl.int64)
            high = key_of(top, bits).to(tl.int64) + 1
            listed, low = _list_groups(
                largest + first_group, groups + first_group, top_k, low, high,
                chunks * _GROUPS, chunks_block * _GROUPS, bits,
            )  # fmt: skip
            groups += first_group
            low, end = _last_of_top_k(row, groups, listed, top_k, low, high, vocab, bits)
            key = low.to(tl.int32)
            used = tl.cdiv(listed, _GROUPS)
            part = tl.zeros((chunks_block,), tl.int64)
            total = tl.sum(part, 0)
            for chunk in range(used):
                column, x = _chunk(row, groups, listed, chunk, vocab)
                weights = weights_of(x, top, scale)
                weights = tl.where(_ranks_before(column, x, key, end, bits), weights, 0)
                total += tl.sum(weights, 0)
                kept = tl.sum(tl.where(weights >= least, weights, 0), 0)
                part = tl.where(each == chunk, kept, part)
        else:
            first = sums + tl.program_id(0) * (2 * chunks)
            part = tl.load(first + each, mask=each < chunks, other=0)
            total = tl.sum(tl.load(first + chunks + each, mask=each < chunks, other=0), 0)
        reach = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)
        token = top_k * 0
        searching = top_k >= 0
        while searching:
            target = tl.umulhi(uniform, tl.sum(part, 0).to(tl.uint64)).to(tl.int64)
            passed = tl.cumsum(part, 0) <= target
            chosen = tl.minimum(tl.sum(passed.to(tl.int32), 0), used - 1)
            target -= tl.sum(tl.where(passed, part, 0), 0)
            column, x = _chunk(row, groups, listed, chosen, vocab)
            weights = weights_of(x, top, scale)
            may_come = _ranks_before(column, x, key, end, bits) & (weights >= least)
            summed = tl.cumsum(tl.where(may_come, weights, 0), 0)
            place = tl.sum((summed <= target).to(tl.int32), 0)
            is_token = tl.arange(0, _CHUNK) == tl.minimum(place, _CHUNK - 1)
            token = tl.sum(tl.where(is_token, column, 0), 0)
            searching = top_p < 1.0
            if searching:
                key = tl.sum(tl.where(is_token, key_of(x, bits), 0), 0)
                end = token
                part = tl.zeros((chunks_block,), tl.int64)
                for chunk in range(used):
                    column, x = _chunk(row, groups, listed, chunk, vocab)
                    better = _ranks_before(column, x, key, end, bits)
                    before = tl.sum(tl.where(better, weights_of(x, top, scale), 0), 0)
                    part = tl.where(each == chunk, before, part)
                uniform = mix_of(uniform + _NEXT)
                searching = tl.sum(part, 0) >= reach
        tl.store(tokens + at, token.to(tl.int64))
