"""Log probabilities in Triton: all logits are read once, then a few of them again.

The first launch reads the logits in chunks of each row: it adds up a chunk's exponentials and takes
the largest logit of each group of neighbours. The second launch has one program for each row, which
adds up the chunks' sums and finds the k most likely tokens. A group contains one of these only if
its largest logit is among the k largest of all groups (ties go to the first group). So the program
finds these groups, then the tokens in them, one after another by a key that orders logits and ids
together.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import log_softmax
from lorikeet_engine.kernels.log_softmax import LogprobRows
from lorikeet_engine.kernels.sampling.arithmetic import key_of

_GROUP = tl.constexpr(64)  # neighbouring tokens with one largest logit
_GROUPS = tl.constexpr(64)  # of a chunk
_CHUNK = tl.constexpr(_GROUP.value * _GROUPS.value)
_ROW, _COUNT = tl.constexpr(log_softmax.ROW), tl.constexpr(log_softmax.COUNT)
_SCALE, _FIELDS = tl.constexpr(log_softmax.SCALE), tl.constexpr(log_softmax.FIELDS)
_MOST = tl.constexpr(log_softmax.MOST)
_LOWEST_KEY = tl.constexpr(-(2**31))
_LOWEST = tl.constexpr(-(2**63))  # below the key and id of any number
_IDS = tl.constexpr(2**32 - 1)


def likeliest(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    """Find the most likely tokens of some rows of logits: see kernels.log_softmax."""
    if most > log_softmax.MOST:
        return log_softmax.likeliest_by_torch(logits, wanted, most)
    rows, vocab = len(wanted), logits.shape[1]
    chunks = triton.cdiv(vocab, _CHUNK.value)
    parts = logits.new_empty((rows, 2, chunks), dtype=torch.float32)
    largest = logits.new_empty((rows, chunks * _GROUPS.value), dtype=torch.int32)
    norms = logits.new_empty((rows, 2), dtype=torch.float32)
    packed = logits.new_empty((rows, 2 + 2 * most), dtype=torch.float32)
    _sum_chunks_of_exp[(rows, chunks)](logits, wanted, parts, largest, vocab, chunks, num_warps=8)
    _find_likeliest[(rows,)](
        logits, wanted, parts, largest, norms, packed, most, vocab, chunks,
        triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return LogprobRows(norms, packed)


def set_given(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the log probability of each row's given token: see kernels.log_softmax."""
    vocab, width = logits.shape[1], found.packed.shape[1]
    _set_given[(len(wanted),)](
        logits, wanted, tokens, found.norms, found.packed, width, vocab, num_warps=1
    )


def set_rank(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the rank of each row's given token: see kernels.log_softmax."""
    vocab, width = logits.shape[1], found.packed.shape[1]
    _set_rank[(len(wanted),)](logits, wanted, tokens, found.packed, width, vocab, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _field(wanted: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """Load one column of `wanted` for the row that this program computes."""
    return tl.load(wanted + tl.program_id(0) * _FIELDS + column)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(wanted: tl.tensor) -> tl.tensor:
    return _field(wanted, _SCALE).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _finite(peak: tl.tensor) -> tl.tensor:
    """Return a row's largest logit, or 0 if it is −inf, as −inf − −inf would be NaN."""
    return tl.where(peak > -float("inf"), peak, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _ordered(key: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Combine sort keys and places to int64s that sort by ascending key, then by descending place.

    place: column of a row of logits, or index of a group of columns.
    key: int32 that compares as a logit does.
    """
    return (key.to(tl.int64) << 32) + (place.to(tl.int64) ^ _IDS)


@triton.jit  # type: ignore[untyped-decorator]
def _place_of(ordered: tl.tensor) -> tl.tensor:
    return ((ordered & _IDS) ^ _IDS).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunks_of_exp(
    logits: tl.tensor,
    wanted: tl.tensor,
    parts: tl.tensor,
    largest: tl.tensor,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
) -> None:
    """Store the largest logit of a chunk, its sum of exponentials, and the largest sort key of each
    of its groups.

    logits, wanted: operands of kernels.log_softmax.likeliest.
    parts: for each row the largest logits of its chunks, then their sums of exponentials.
    largest: for each row the largest sort key of each group, _GROUP neighbouring columns.
    """
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = _field(wanted, _ROW)
    group = tl.arange(0, _GROUPS)
    column = chunk * _CHUNK + group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < vocab
    x = tl.load(logits + row * vocab + column, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(tl.max(x, 1), 0)
    tl.store(parts + index * (2 * chunks) + chunk, peak)
    summed = tl.sum(tl.sum(tl.exp((x - _finite(peak)) * _scale(wanted)), 1), 0)
    tl.store(parts + index * (2 * chunks) + chunks + chunk, summed)
    keys = tl.where(inside, key_of(x, 32), _LOWEST_KEY)
    tl.store(largest + index * (chunks * _GROUPS) + chunk * _GROUPS + group, tl.max(keys, 1))


@triton.jit(do_not_specialize=["most"])  # type: ignore[untyped-decorator]
def _find_likeliest(
    logits: tl.tensor,
    wanted: tl.tensor,
    parts: tl.tensor,
    largest: tl.tensor,
    norms: tl.tensor,
    packed: tl.tensor,
    most: tl.tensor,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    chunks_block: tl.constexpr,
) -> None:
    """Find one row's most likely tokens and their log probabilities.

    logits, wanted, most: operands of kernels.log_softmax.likeliest.
    parts, largest: results of _sum_chunks_of_exp.
    norms, packed: sums of exponentials, and tokens with log probabilities (LogprobRows); written
        here.
    chunks_block: `chunks` rounded up to a power of two.
    """
    index = tl.program_id(0).to(tl.int64)
    row = _field(wanted, _ROW)
    count, scale = _field(wanted, _COUNT).to(tl.int32), _scale(wanted)
    each = tl.arange(0, chunks_block)
    first = parts + index * (2 * chunks) + each
    peaks = tl.load(first, mask=each < chunks, other=-float("inf"))
    summed = tl.load(first + chunks, mask=each < chunks, other=0.0)
    best = tl.max(peaks, 0)
    log_sum = tl.log(tl.sum(summed * tl.exp((peaks - _finite(best)) * scale), 0))
    tl.store(norms + index * 2, best)
    tl.store(norms + index * 2 + 1, log_sum)

    group = tl.arange(0, chunks_block * _GROUPS)
    real = group < tl.cdiv(vocab, _GROUP)
    keys = tl.load(largest + index * (chunks * _GROUPS) + group, mask=real, other=_LOWEST_KEY)
    left = tl.where(real, _ordered(keys, group), _LOWEST)
    place = tl.arange(0, _MOST)
    groups = tl.zeros((_MOST,), tl.int32)
    listed = tl.minimum(count, tl.cdiv(vocab, _GROUP))
    for rank in range(listed):
        top = tl.max(left, 0)
        groups = tl.where(place == rank, _place_of(top), groups)
        left = tl.where(left == top, _LOWEST, left)

    column = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = (place < listed)[:, None] & (column < vocab)
    x = tl.load(logits + row * vocab + column, mask=inside, other=0.0).to(tl.float32)
    candidates = tl.where(inside, _ordered(key_of(x, 32), column), _LOWEST)
    candidates = tl.reshape(candidates, (_MOST * _GROUP,), can_reorder=True)
    likeliest = tl.zeros((_MOST,), tl.int64)
    for rank in range(count):
        top = tl.max(candidates, 0)
        likeliest = tl.where(place == rank, top, likeliest)
        candidates = tl.where(candidates == top, _LOWEST, candidates)
    keys = (likeliest >> 32).to(tl.int32)
    values = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    at = packed + index * (2 + 2 * most) + 2 + place
    tl.store(at, (values - best) * scale - log_sum, mask=place < count)
    tl.store(at + most, _place_of(likeliest).to(tl.float32, bitcast=True), mask=place < count)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["width"], do_not_specialize_on_alignment=["tokens"]
)
def _set_given(
    logits: tl.tensor,
    wanted: tl.tensor,
    tokens: tl.tensor,
    norms: tl.tensor,
    packed: tl.tensor,
    width: tl.tensor,
    vocab: tl.constexpr,
) -> None:
    """Store the log probability of one row's given token in `packed`.

    wanted: index and factor of each selected row of logits. tokens: given token of each row.
    norms: largest logit and log sum of exponentials of each selected row (LogprobRows).
    width: columns of `packed`.
    """
    index = tl.program_id(0).to(tl.int64)
    row = _field(wanted, _ROW)
    token = tl.maximum(tl.load(tokens + row), 0)
    x = tl.load(logits + row * vocab + token).to(tl.float32)
    best, log_sum = tl.load(norms + index * 2), tl.load(norms + index * 2 + 1)
    tl.store(packed + index * width, (x - best) * _scale(wanted) - log_sum)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["width"], do_not_specialize_on_alignment=["tokens"]
)
def _set_rank(
    logits: tl.tensor,
    wanted: tl.tensor,
    tokens: tl.tensor,
    packed: tl.tensor,
    width: tl.tensor,
    vocab: tl.constexpr,
) -> None:
    """Store the rank of one row's given token in `packed`.

    The rank is 1 plus the number of likelier tokens and of equally likely tokens with a lower id.

    wanted: index of each selected row of logits. tokens: given token of each row of logits.
    width: columns of `packed`.
    """
    index = tl.program_id(0).to(tl.int64)
    row = logits + _field(wanted, _ROW) * vocab
    token = tl.maximum(tl.load(tokens + _field(wanted, _ROW)), 0)
    given = tl.load(row + token).to(tl.float32)
    before = tl.zeros((_CHUNK,), tl.int32)
    for chunk in range(0, vocab, _CHUNK):
        column = chunk + tl.arange(0, _CHUNK)
        inside = column < vocab
        x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        before += (inside & ((x > given) | ((x == given) & (column < token)))).to(tl.int32)
    rank = 1 + tl.sum(before, 0)
    tl.store(packed + index * width + 1, rank.to(tl.float32, bitcast=True))
