"""Builds the input of one forward pass from the chunks that the scheduler planned."""

from operator import itemgetter

import numpy as np

from lorikeet_engine.kernels.attention import PageTable
from lorikeet_engine.models.batch import Int32s, Int64s, StepInput
from lorikeet_engine.scheduling.sequence import AdapterLease, Chunk


def group_by_adapter(chunks: list[Chunk]) -> list[Chunk]:
    """The chunks, sorted so that those of one adapter are neighbours; those without come last."""
    leased = [(lease.slot, chunk) for chunk in chunks if (lease := chunk.sequence.lease)]
    leased.sort(key=itemgetter(0))
    return [chunk for _, chunk in leased] + [c for c in chunks if c.sequence.lease is None]


def build_step_input(chunks: list[Chunk], page_size: int) -> StepInput:
    """The input of a step of these chunks, which must be in group_by_adapter's order.

    Row i of the logits belongs to the i-th of the chunks that complete their sequence.
    """
    computed = np.array([chunk.start for chunk in chunks], np.int64)
    kv_lengths = np.array([chunk.end for chunk in chunks], np.int64)
    lengths = kv_lengths - computed
    ends = lengths.cumsum()
    starts = ends - lengths
    owner = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]: which chunk each belongs to
    positions = np.arange(len(owner)) - (starts - computed)[owner]
    table = PageTable.of([chunk.pages for chunk in chunks], kv_lengths, page_size)
    pages = table.pages[table.starts[owner] + positions // page_size].astype(np.int64)
    ids, pending, pending_rows = _token_ids(chunks)
    leases = [lease for chunk in chunks if (lease := chunk.sequence.lease)]
    return StepInput(
        token_ids=ids,
        positions=positions,
        kv_slots=pages * page_size + positions % page_size,
        logit_rows=ends[[chunk.completes for chunk in chunks]] - 1,
        pending=pending,
        pending_rows=pending_rows,
        query_starts=np.append(starts, len(ids)).astype(np.int32),
        kv_lengths=kv_lengths.astype(np.int32),
        page_table=table,
        segments=_segments(leases, starts, lengths),
        max_rank=max((lease.rank for lease in leases), default=0),
    )


def _token_ids(chunks: list[Chunk]) -> tuple[Int64s, Int64s, Int64s]:
    """StepInput's token_ids, pending and pending_rows."""
    ids, pending, pending_rows = list[int](), list[int](), list[int]()
    for chunk in chunks:
        sequence = chunk.sequence
        ids += sequence.tokens[chunk.start : chunk.end]
        if sequence.pending_rows:  # one at most, its last: only the step before is not read
            pending.append(len(ids))
            pending_rows.append(sequence.pending_rows[0])
            ids.append(0)
    return np.array(ids, np.int64), np.array(pending, np.int64), np.array(pending_rows, np.int64)


def _segments(leases: list[AdapterLease], starts: Int64s, lengths: Int64s) -> Int32s:
    # Chunks with a lease come first, so index i is the same in leases, starts and lengths.
    if not leases:
        return np.zeros((3, 0), np.int32)
    slots, first = np.unique([lease.slot for lease in leases], return_index=True)
    sums = np.add.reduceat(lengths[: len(leases)], first)
    return np.stack((slots, starts[first], sums)).astype(np.int32)
