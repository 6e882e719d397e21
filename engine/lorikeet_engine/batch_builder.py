"""From the chunks that the scheduler chose to the tensors of one forward pass."""

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.batch import Batch
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.sequence import Chunk

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def by_adapter(chunks: list[Chunk]) -> list[Chunk]:
    """Those of one adapter side by side, those without one last."""
    return sorted(chunks, key=lambda c: c.sequence.lease.slot if c.sequence.lease else 1 << 62)


def build_batch(chunks: list[Chunk], page_size: int, device: torch.device) -> Batch:
    """The batch of chunks in `by_adapter`'s order whose sequences already have their pages.

    Row i of the logits belongs to the i-th of the chunks that complete their sequence.
    """
    computed = np.array([chunk.sequence.computed for chunk in chunks], np.int64)
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    ends = lengths.cumsum()
    starts = ends - lengths
    owner = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]: which chunk each belongs to
    positions = np.arange(len(owner)) - (starts - computed)[owner]
    tables = _page_tables(chunks)
    kv_slots = tables[owner, positions // page_size].astype(np.int64)
    kv_slots = kv_slots * page_size + positions % page_size
    completes = np.array([chunk.completes for chunk in chunks])
    return Batch(
        token_ids=_to(device, _token_ids(chunks)),
        positions=_to(device, positions),
        kv_slots=_to(device, kv_slots),
        query_starts=(0, *ends.tolist()),
        kv_lengths=tuple((computed + lengths).tolist()),
        page_tables=torch.from_numpy(tables),
        logit_rows=_to(device, ends[completes] - 1),
        segments=_segments(chunks, starts, lengths, device),
    )


def _token_ids(chunks: list[Chunk]) -> Int64s:
    ids: list[int] = []
    for chunk in chunks:
        start = chunk.sequence.computed
        ids += chunk.sequence.tokens[start : start + chunk.length]
    return np.array(ids, np.int64)


def _page_tables(chunks: list[Chunk]) -> Int32s:
    width = max(len(chunk.sequence.pages) for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.pages)] = chunk.sequence.pages
    return tables


def _segments(
    chunks: list[Chunk], starts: Int64s, lengths: Int64s, device: torch.device
) -> Segments | None:
    leases = [chunk.sequence.lease for chunk in chunks if chunk.sequence.lease is not None]
    if not leases:
        return None
    # Chunks with a lease come first, so index i is the same in leases, starts and lengths.
    slots, first = np.unique([lease.slot for lease in leases], return_index=True)
    return Segments(
        slots=_to(device, slots.astype(np.int32)),
        starts=_to(device, starts[first].astype(np.int32)),
        lengths=_to(device, np.add.reduceat(lengths[: len(leases)], first).astype(np.int32)),
        max_rank=max(lease.rank for lease in leases),
    )


def _to(device: torch.device, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
