"""Prefixes of a step's prompt chunks, cut into parts that fill a GPU.

FlashInfer's FA3 kernels do not split a long sequence: a chunk of few tokens far into a prompt
leaves most multiprocessors idle. But all tokens of a chunk attend to all tokens before the chunk.
So the prefix can be cut anywhere, the query heads that share a key head can become rows of one
head, and the results of the parts are merged with the chunk's attention to itself (merge.py).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences, PageTable

Int32s = npt.NDArray[np.int32]

_TILE = 128  # query rows of one of FA3's programs, for heads of 128
_MOST_PARTS = 16
_MOST_TILES = 8  # of parts, for each program: bounds the parts' memory
# Measured with 12 chunks of 128 to 384 tokens on an H200. A tile takes 13.6 ns for each of its
# keys. Its start and end take as long as 400 keys; a second launch, with copies and merging, as
# long as 2,000.
_KEYS_TO_BEGIN, _KEYS_TO_CUT = 400, 2000


@dataclass(frozen=True, slots=True)
class PlannedSequences:
    """Sequences for one plan of an attention kernel; implements PagedSequences.

    query_starts [sequences + 1]: first query token of each sequence, then the number of all tokens.
    page_tables: KV pages of the sequences, one table for each group of layers.
    """

    query_starts: Int32s
    page_tables: tuple[PageTable, ...]


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """A step's prompt chunks, with the full KV pages before each chunk cut into parts.

    parts: each part as a sequence. Its queries are the queries of the chunk, each of which attends
        to all keys of the part.
    tokens: for each query token of the parts, the token's index in the step. In a part, each of the
        query heads that share a key head is a query row of its own.
    places [tokens, 3] int32: for each token of the step, where its query rows are in `parts`: the
        row of its first query head in its chunk's first part, the number of rows from one of the
        chunk's parts to the next, and the number of these parts.
    own: the step's sequences without the pages that are in parts.
    """

    parts: PlannedSequences
    tokens: npt.NDArray[np.int64]
    places: Int32s
    own: PlannedSequences


def cut_prefixes(batch: PagedSequences, shape: AttentionShape, programs: int) -> PrefixParts | None:
    """Cut the keys before each prompt chunk into parts, which GPU programs share.

    Only full pages are cut. Returns None if cutting saves no time.

    programs: number of GPU programs that run at the same time.
    """
    starts, table = batch.query_starts, batch.page_tables[0]
    rows, group = np.diff(starts), shape.heads // shape.kv_heads
    before = (table.kv_lengths - rows) // shape.page_size
    tiles = -(-rows * group // _TILE) * shape.kv_heads
    cut = count_parts(tiles[before > 0], shape.page_size * before[before > 0], programs)
    if cut == 1:
        return None
    counts = np.minimum(cut, before)
    owner = np.repeat(np.arange(len(rows)), counts)
    first = counts.cumsum() - counts  # of each chunk's parts
    nth = np.arange(len(owner)) - first[owner]
    pages = before[owner] * (nth + 1) // counts[owner] - before[owner] * nth // counts[owner]
    at = starts_of(rows[owner])
    tokens = np.repeat(starts[owner] - at[:-1], rows[owner]) + np.arange(at[-1])
    chunk = np.repeat(np.arange(len(rows)), rows)  # of each token
    nearest = at[first[chunk]] + np.arange(len(chunk)) - starts[chunk]  # in its first part
    places = np.stack((nearest * group, rows[chunk] * group, counts[chunk]), axis=1)
    of_parts, own = _divided(table, before, pages, shape.page_size)
    return PrefixParts(
        PlannedSequences(starts_of(rows[owner] * group), (of_parts,)),
        tokens,
        places.astype(np.int32),
        PlannedSequences(starts, (own,)),
    )


def count_parts(
    tiles: npt.NDArray[np.integer], keys: npt.NDArray[np.integer], programs: int
) -> int:
    """Return the number of parts into which the keys before each chunk are cut, so that attention
    ends soonest.

    tiles [chunks]: number of query tiles of each chunk; each of its parts has as many.
    keys [chunks]: number of keys before each chunk.
    programs: number of GPU programs that run at the same time.
    """
    total = int(tiles.sum())
    if not total:
        return 1
    mean = float(tiles @ keys) / total

    def longest(parts: int) -> float:
        keys_in_turn = math.ceil(parts * total / programs) * (mean / parts + _KEYS_TO_BEGIN)
        return keys_in_turn + (_KEYS_TO_CUT if parts > 1 else 0)

    most = min(_MOST_PARTS, _MOST_TILES * programs // total)
    return min(range(1, max(1, most) + 1), key=longest)


def seen_by_each(
    tokens: npt.NDArray[np.integer], kv_lengths: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Return each sequence's number of pairs of a query token and a token that it attends to.

    The query tokens are the last of the sequence. The number is approximate, as costs.seen_tokens.

    tokens [sequences]: number of query tokens of each sequence.
    kv_lengths [sequences]: lengths of the sequences.
    """
    tokens_wide = tokens.astype(np.int64)
    return tokens_wide * (2 * kv_lengths - tokens_wide) // 2


def starts_of(lengths: npt.NDArray[np.integer]) -> Int32s:
    """Return the start of each of several concatenated runs, and the end of the last run.

    lengths: length of each run.
    """
    return np.concatenate(([0], lengths.cumsum()), dtype=np.int32)


def _divided(
    table: PageTable,
    before: npt.NDArray[np.integer],
    pages: npt.NDArray[np.integer],
    page_size: int,
) -> tuple[PageTable, PageTable]:
    """Divide a page table into one for prefix parts and one for each sequence's other pages.

    before [sequences]: number of each sequence's first pages that go to prefix parts.
    pages [parts]: number of pages of each part.
    page_size: tokens of a page.
    """
    owned = np.diff(table.starts)
    nth = np.arange(len(table.pages)) - np.repeat(table.starts[:-1], owned)
    in_parts = nth < np.repeat(before, owned)
    left = (table.kv_lengths - before * page_size).astype(np.int32)
    return (
        PageTable(starts_of(pages), table.pages[in_parts], (pages * page_size).astype(np.int32)),
        PageTable(starts_of(owned - before), table.pages[~in_parts], left),
    )


def chosen_sequences(batch: PagedSequences, chosen: npt.NDArray[np.bool_]) -> PlannedSequences:
    """Return some sequences of a batch as a batch of their own.

    chosen [sequences]: whether to include a sequence.
    """
    query_starts = starts_of(np.diff(batch.query_starts)[chosen])
    return PlannedSequences(query_starts, tuple(_of(table, chosen) for table in batch.page_tables))


def _of(table: PageTable, chosen: npt.NDArray[np.bool_]) -> PageTable:
    pages = np.diff(table.starts)
    used = table.pages[np.repeat(chosen, pages)]
    return PageTable(starts_of(pages[chosen]), used, table.kv_lengths[chosen])
