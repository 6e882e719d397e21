"""What comes before the chunks of a step's prompts, cut into parts that fill a GPU.

FlashInfer's FA3 kernels do not split a long sequence: a chunk of few tokens deep in a prompt would
leave most multiprocessors idle. But all that comes before a chunk is seen by all of its tokens, so
it can be cut anywhere, the query heads that share a key head can be rows of one, and what the parts
give is merged with what the chunk sees in itself (merge.py).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences, PageTable

Int32s = npt.NDArray[np.int32]

# PLACEHOLDER until measured
LEAST_SEEN = 1 << 21
_MOST_PARTS = 16
_FULL = 0.95  # the share of the programs with work at which a finer cut gains nothing


@dataclass(frozen=True, slots=True)
class PlannedSequences:
    """PagedSequences for one plan."""

    query_starts: Int32s
    page_tables: tuple[PageTable, ...]


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Parts of the whole pages before chunks, and the chunks without them.

    parts: each as a sequence all of whose keys its queries see. Queries are a step's `tokens`, once
    for each part and query head of those that share a key head. places: merge's, for each token of
    the step. own: the step's sequences, without what parts have of them.
    """

    parts: PlannedSequences
    tokens: npt.NDArray[np.int64]
    places: Int32s
    own: PlannedSequences


def is_deep(batch: PagedSequences) -> bool:
    """Whether a step's prompts see so much before them that it is worth a launch of its own."""
    rows = np.diff(batch.query_starts).astype(np.int64)
    before = batch.page_tables[0].kv_lengths - rows
    return bool(rows @ before >= LEAST_SEEN)


def cut_prefixes(batch: PagedSequences, shape: AttentionShape, programs: int) -> PrefixParts:
    """Cut what comes before each chunk. programs: how many of FA3's run at a time."""
    starts, table = batch.query_starts, batch.page_tables[0]
    rows, group = np.diff(starts), shape.heads // shape.kv_heads
    before = (table.kv_lengths - rows) // shape.page_size
    tiles = -(-rows * group // _tile(shape)) * shape.kv_heads
    counts = np.minimum(count_parts(int(tiles[before > 0].sum()), programs), before)
    owner = np.repeat(np.arange(len(rows)), counts)
    first = counts.cumsum() - counts  # of each chunk's parts
    nth = np.arange(len(owner)) - first[owner]
    pages = before[owner] * (nth + 1) // counts[owner] - before[owner] * nth // counts[owner]
    of_parts = rows[owner]
    at = starts_of(of_parts)
    tokens = np.repeat(starts[owner] - at[:-1], of_parts) + np.arange(at[-1])
    each = np.repeat(np.arange(len(rows)), rows)  # a token's chunk
    nearest = np.append(at[:-1], 0)[np.where(counts, first, -1)]  # where its first part's rows are
    places = np.stack(
        (
            (nearest[each] + np.arange(len(each)) - starts[each]) * group,
            rows[each] * group,
            counts[each],
        ),
        axis=1,
    )
    owned = np.diff(table.starts)
    nth_page = np.arange(len(table.pages)) - np.repeat(table.starts[:-1], owned)
    is_before = nth_page < np.repeat(before, owned)
    return PrefixParts(
        PlannedSequences(
            starts_of(of_parts * group),
            (
                PageTable(
                    starts_of(pages),
                    table.pages[is_before],
                    (pages * shape.page_size).astype(np.int32),
                ),
            ),
        ),
        tokens,
        places.astype(np.int32),
        PlannedSequences(
            starts,
            (
                PageTable(
                    starts_of(owned - before),
                    table.pages[~is_before],
                    (table.kv_lengths - before * shape.page_size).astype(np.int32),
                ),
            ),
        ),
    )


def count_parts(tiles: int, programs: int) -> int:
    """Into how many parts to cut keys, so that so many tiles for each part fill the programs."""

    def used(parts: int) -> float:
        return parts * tiles / (programs * math.ceil(parts * tiles / programs))

    counts = range(1, _MOST_PARTS + 1)
    if not tiles:
        return 1
    return next((parts for parts in counts if used(parts) >= _FULL), max(counts, key=used))


def starts_of(lengths: npt.NDArray[np.integer]) -> Int32s:
    """Where each of so long runs starts, end to end, and where the last ends."""
    return np.concatenate(([0], lengths.cumsum()), dtype=np.int32)


def _tile(shape: AttentionShape) -> int:
    """The rows of one of FA3's programs."""
    return 192 if shape.head_dim <= 64 else 128
