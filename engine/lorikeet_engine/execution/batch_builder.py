"""Input of one forward pass, built from the chunks that the scheduler planned."""

from dataclasses import dataclass
from itertools import compress
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.kernels.delta_net import CHUNK, Decodes, Prefills
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.models.batch import Batch, Int32s, StateRows
from lorikeet_engine.scheduling.kv_cache import StateUse
from lorikeet_engine.scheduling.sequence import AdapterLease, Chunk

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateInput:
    """States of delta nets (linear attention) that a step reads and updates; arrays on the host.

    decodes [2, sequences]: of sequences with one token in the step, the slot of the state and the
        index of the token.
    starts, ends, slots [sequences]: of sequences with several tokens, the first token, the token
        after the last, and the slot of the state.
    chunks [chunks, 2]: of each piece of at most CHUNK tokens, the sequence and the first token.
    first_chunks [sequences + 1]: first chunk of each sequence, then the number of chunks.
    saves [chunks]: slot to which the state after each chunk is copied; −1: none.
    fresh: slots to set to zeros before the step, of sequences that begin.
    copies: pairs of slots, from which a state is copied and to which, in order, before the step.
    """

    decodes: Int64s
    starts: Int64s
    ends: Int64s
    slots: Int64s
    chunks: Int64s
    first_chunks: Int64s
    saves: Int64s
    fresh: Int64s
    copies: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, uses: list[StateUse], begins: list[bool], query_starts: Int64s) -> "StateInput":
        """Build the input for these sequences.

        uses: use of each sequence's state, in the order of the step's tokens.
        begins: for each sequence, whether the step has its first token.
        query_starts [sequences + 1]: first token of each sequence, then the number of tokens.
        """
        slots, starts = np.array([use.slot for use in uses], np.int64), query_starts[:-1]
        several = np.diff(query_starts) > 1
        first, ends = starts[several], query_starts[1:][several]
        counts = -(-(ends - first) // CHUNK)
        first_chunks = np.append(0, counts.cumsum())
        owner = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owner)) - first_chunks[owner]
        saves = np.full(len(owner), -1, np.int64)
        for chunk, use in zip(first_chunks.tolist(), compress(uses, several), strict=False):
            for save in use.saves:
                saves[chunk + save.tokens // CHUNK - 1] = save.slot
        restores = [(use.restore, use.slot) for use in uses if use.restore is not None]
        copies = [(use.slot, to) for use in uses for to in (use.copy, use.backup) if to is not None]
        return cls(
            decodes=np.stack([slots[~several], starts[~several]]),
            starts=first,
            ends=ends,
            slots=slots[several],
            chunks=np.stack([owner, first[owner] + CHUNK * within], 1),
            first_chunks=first_chunks,
            saves=saves,
            fresh=slots[begins],
            copies=_read_before_written([*restores, *copies]),
        )

    def upload(self, device: torch.device) -> StateRows:
        """Copy the input to the device; the host waits for nothing."""
        prompts = self.starts, self.ends, self.slots, self.chunks, self.first_chunks, self.saves
        narrow = [*self.decodes, *(each.ravel() for each in prompts)]
        uploaded = upload(np.concatenate(narrow).astype(np.int32), device)
        slots, tokens, starts, ends, of_prompts, chunks, *rest = torch.split(
            uploaded, [*map(len, narrow)]
        )
        return StateRows(
            Decodes(slots, tokens if len(starts) else None) if len(slots) else None,
            Prefills(starts, ends, of_prompts, chunks.view(-1, 2), *rest) if len(starts) else None,
            upload(self.fresh, device),
            self.copies,
        )


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of one step on the host: all that a process with the model's weights needs.

    token_ids [tokens]: 0 stands in for a pending token, which the previous step sampled and the
        host has not read yet.
    positions [tokens]: position of each token in its sequence.
    kv_slots [groups of layers, tokens]: page · page_size + offset of each token's keys and values.
    logit_rows [rows]: indices of the tokens whose logits are computed for sampling.
    query_starts [sequences + 1]: first token of each sequence, then the number of tokens.
    kv_lengths [sequences]: number of cached tokens of each sequence after the step.
    pending: [pending tokens] int64, indices of the pending tokens in token_ids.
    pending_rows: [pending tokens] int64, row of each pending token in the previous step's sampled
        tokens.
    page_tables: for each group of layers, each sequence's pages from the first one that a token of
        this step attends to.
    segments: [3, segments] int32, slot of the adapter (row of LoraWeights.table), first token and
        length of each run of tokens with one adapter; no segments without adapters.
    max_rank: upper bound of the ranks of the adapters in segments.
    changes_experts: whether some adapter changes linears of experts.
    has_vectors: whether some adapter has DoRA's gains (an output is times 1 + gain) or biases.
    composed: whether some slot is that of a composition, several adapters added up.
    head_segments: [3, segments] int32, like segments, for lm_head and the rows of its logits.
    head_rank: upper bound of the adapters' ranks on lm_head.
    head_rows: upper bound of the number of lm_head's rows that one adapter replaces.
    states: states of delta nets that the step uses; None for a model without delta nets.
    ordered: whether logit_rows ascends; noise has the last rows, but not the last tokens.
    """

    token_ids: Int64s
    positions: Int64s
    kv_slots: Int64s
    logit_rows: Int64s
    pending: Int64s
    pending_rows: Int64s
    query_starts: Int32s
    kv_lengths: Int32s
    page_tables: tuple[PageTable, ...]
    segments: Int32s
    max_rank: int
    changes_experts: bool
    has_vectors: bool
    composed: bool
    head_segments: Int32s
    head_rank: int
    head_rows: int
    states: StateInput | None = None
    ordered: bool = True

    def upload(self, device: torch.device, previous: torch.Tensor | None = None) -> Batch:
        """Copy the step to the device; the host waits for nothing.

        previous: tokens that the previous step sampled, already on the device, [rows] int64. Needed
            if the step has pending tokens.
        """
        parts = (
            self.token_ids, self.positions, self.kv_slots.ravel(), self.logit_rows,
            self.pending, self.pending_rows,
        )  # fmt: skip
        uploaded = upload(np.concatenate(parts), device)
        token_ids, positions, kv_slots, logit_rows, pending, pending_rows = torch.split(
            uploaded, [len(part) for part in parts]
        )
        if len(pending):
            assert previous is not None, "pending tokens of no step"
            token_ids.index_copy_(0, pending, previous[pending_rows])
        return Batch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots.view(self.kv_slots.shape),
            logit_rows=logit_rows,
            query_starts=self.query_starts,
            kv_lengths=self.kv_lengths,
            page_tables=self.page_tables,
            segments=_upload_segments(
                self.segments,
                self.max_rank,
                device,
                changes_experts=self.changes_experts,
                has_vectors=self.has_vectors,
                composed=self.composed,
            ),
            head_segments=_upload_segments(
                self.head_segments, self.head_rank, device, self.head_rows, composed=self.composed
            ),
            states=None if self.states is None else self.states.upload(device),
            ordered=self.ordered,
        )


@dataclass(frozen=True, slots=True)
class LogitsInput:
    """Tokens of a step whose logits are needed in addition to the logits for sampling; arrays on
    the host.

    rows: [rows] int64, indices of these tokens in the step.
    head_segments: [3, segments] int32, slots, starts and lengths of lm_head's LoRA segments over
        `rows`.
    head_rank: upper bound of the adapters' ranks on lm_head.
    head_rows: upper bound of the number of lm_head's rows that one adapter replaces.
    composed: whether some slot is that of a composition, several adapters added up.
    """

    rows: Int64s
    head_segments: Int32s
    head_rank: int
    head_rows: int
    composed: bool

    def upload(self, device: torch.device) -> tuple[torch.Tensor, Segments | None]:
        """Copy the indices and lm_head's segments to the device; the host waits for nothing."""
        heads = _upload_segments(
            self.head_segments, self.head_rank, device, self.head_rows, composed=self.composed
        )
        return upload(self.rows, device), heads


def group_by_adapter(chunks: list[Chunk]) -> list[Chunk]:
    """Sort the chunks by adapter, so that chunks of one adapter are side by side.

    Chunks whose adapters change lm_head come first, chunks without an adapter last.
    """
    leased = [
        (not _changes_head(lease), lease.slot, chunk) for chunk in chunks if (lease := chunk.lease)
    ]
    leased.sort(key=itemgetter(0, 1))
    return [chunk for *_, chunk in leased] + [c for c in chunks if c.lease is None]


def divide_by_adapter(chunks: list[Chunk]) -> list[Chunk]:
    """Divide each chunk within which an activated LoRA begins to change tokens: the tokens before
    become a chunk without an adapter.

    Attention computes both as sequences that share KV pages: keys and values of all tokens of a
    step are written before attention reads them. So chunks with states cannot be divided.

    chunks: chunks in the order of group_by_adapter.
    → chunks in the order of group_by_adapter; the rows of logits keep their order
    """
    whole = list[Chunk]()
    before = list[Chunk]()
    for chunk in chunks:
        begins = chunk.sequence.active_from
        if chunk.start < begins < chunk.end:
            before.append(chunk._replace(end=begins, completes=False, drafted=(), noise=()))
            chunk = chunk._replace(start=begins)
        whole.append(chunk)
    return whole + before


def with_noise(chunks: list[Chunk], draft: AdapterLease | None) -> list[Chunk]:
    """Add a chunk for the noise behind each chunk that has any.

    As in divide_by_adapter, both chunks are sequences that share KV pages. The keys and values of
    noise are written behind those of the sequence, where later steps write other ones.

    chunks: chunks in the order of divide_by_adapter.
    draft: lease of the draft LoRA, which changes the noise.
    → chunks in the order of divide_by_adapter; their rows of logits keep their order, and those of
      noise follow them
    """
    noise = [
        chunk._replace(
            start=chunk.end,
            end=chunk.end + len(chunk.noise),
            completes=False,
            drafted=(),
            draft=draft,
        )
        for chunk in chunks
        if chunk.noise
    ]
    return group_by_adapter([*chunks, *noise]) if noise else chunks


def build_step_input(
    chunks: list[Chunk], page_size: int, windows: tuple[int | None, ...] = (None,)
) -> StepInput:
    """Build the input of a step that computes these chunks.

    chunks: chunks to compute, in the order of divide_by_adapter.
    windows: attention window of each group of layers; None for a group that attends to all tokens.

    Logits are computed for the last `Chunk.rows` tokens of each chunk from which its sequence's
    next token is sampled, in the order of the chunks, then for all noise tokens: random tokens
    from which a draft LoRA predicts (scheduling/draft_budget.py).
    """
    rows = np.array([chunk.rows for chunk in chunks], np.int64)  # rows of logits, by chunk
    computed = np.array([chunk.start for chunk in chunks], np.int64)
    kv_lengths = np.array([chunk.end for chunk in chunks], np.int64)
    lengths = kv_lengths - computed
    ends = lengths.cumsum()
    starts = ends - lengths
    owner = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]: index of the token's chunk
    positions = np.arange(len(owner)) - (starts - computed)[owner]
    query_starts = np.append(starts, len(owner))
    tables, slots = _kv_places(chunks, windows, owner, positions, page_size)
    ids, pending, pending_rows = _token_ids(chunks)
    leases = [lease for chunk in chunks if (lease := chunk.lease)]
    sampled = np.repeat(ends - rows.cumsum(), rows) + np.arange(rows.sum())
    is_noise = np.array([chunk.draft is not None for chunk in chunks], bool)
    return StepInput(
        token_ids=ids,
        positions=positions,
        kv_slots=slots,
        logit_rows=np.append(sampled, np.flatnonzero(is_noise[owner])),
        pending=pending,
        pending_rows=pending_rows,
        query_starts=query_starts.astype(np.int32),
        kv_lengths=kv_lengths.astype(np.int32),
        page_tables=tables,
        segments=_segments(leases, lengths),
        max_rank=max((lease.rank for lease in leases), default=0),
        changes_experts=any(lease.changes_experts for lease in leases),
        has_vectors=any(lease.has_vectors for lease in leases),
        composed=any(lease.composed for lease in leases),
        head_segments=head_segments(chunks, rows),
        head_rank=max((lease.head_rank for lease in leases), default=0),
        head_rows=max((lease.head_rows for lease in leases), default=0),
        states=_state_input(chunks, query_starts),
        ordered=not is_noise.any(),
    )


def _state_input(chunks: list[Chunk], query_starts: Int64s) -> StateInput | None:
    uses = [chunk.state for chunk in chunks if chunk.state is not None]
    if not uses:
        return None
    assert len(uses) == len(chunks), "chunks without states"
    return StateInput.of(uses, [chunk.start == 0 for chunk in chunks], query_starts)


def _read_before_written(copies: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Order copies of states so that each slot is read before another copy is written to it.

    Each slot is written at most once, and no copies form a circle.

    copies: pairs of slots, from which a state is copied and to which.
    """
    ordered = list[tuple[int, int]]()
    while copies:
        read = {source for source, _ in copies}
        ready = [pair for pair in copies if pair[1] not in read]
        assert ready, "copies of states in a circle"
        ordered += ready
        copies = [pair for pair in copies if pair[1] in read]
    return tuple(ordered)


def _kv_places(
    chunks: list[Chunk],
    windows: tuple[int | None, ...],
    owner: Int64s,
    positions: Int64s,
    page_size: int,
) -> tuple[tuple[PageTable, ...], Int64s]:
    """Return the fields page_tables and kv_slots of a StepInput, for each group of layers.

    windows: attention window of each group of layers; None for a group that attends to all tokens.
    owner: [tokens], index of each token's chunk.
    positions: [tokens], position of each token in its sequence.
    """
    begins = np.array([chunk.start for chunk in chunks], np.int64)
    page, at = np.divmod(positions, page_size)
    tables, slots = list[PageTable](), list[Int64s]()
    for group, window in enumerate(windows):
        first = np.zeros_like(begins)
        if window is not None:
            first = np.maximum(begins + 1 - window, 0) // page_size
        table = _page_table(chunks, group, first, page_size)
        places = (table.starts[:-1] - first)[owner] + page
        slots.append(table.pages[places].astype(np.int64) * page_size + at)
        tables.append(table)
    return tuple(tables), np.stack(slots)


def _page_table(chunks: list[Chunk], group: int, first: Int64s, page_size: int) -> PageTable:
    """Return the page table of a group of layers, without the pages that no token attends to.

    first: [chunks], first page to include of each chunk's sequence.
    """
    tables = [chunk.pages[group] for chunk in chunks]
    kv_lengths = np.array([chunk.end for chunk in chunks], np.int64)
    if first.any():
        held = zip(chunks, tables, first.tolist(), strict=True)
        skipped = [(pages, page - chunk.sequence.kv.first) for chunk, pages, page in held]
        tables = [pages[count:] for pages, count in skipped]
    return PageTable.of(tables, kv_lengths - first * page_size, page_size)


def head_segments(chunks: list[Chunk], rows: Int64s) -> Int32s:
    """Return segments [3, segments] of the adapters that change lm_head: slots, starts, lengths.

    rows: [chunks], number of rows of logits that each chunk has. The rows lie in the order of the
        chunks.
    """
    leases = [lease for chunk in chunks if (lease := chunk.lease)]
    return _segments([lease for lease in leases if _changes_head(lease)], rows)


def build_logits_input(chunks: list[Chunk], rows: Int64s, of_chunks: Int64s) -> LogitsInput:
    """Build the input for the logits of some tokens of a step.

    chunks: chunks of the step, in the order of group_by_adapter.
    rows: indices in the step of the tokens whose logits are computed, in the order of the chunks.
    of_chunks: [chunks], how many of the rows belong to each chunk.
    """
    leases = [lease for chunk in chunks if (lease := chunk.lease)]
    rank = max((lease.head_rank for lease in leases), default=0)
    token_rows = max((lease.head_rows for lease in leases), default=0)
    composed = any(lease.composed for lease in leases)
    return LogitsInput(rows, head_segments(chunks, of_chunks), rank, token_rows, composed)


def _changes_head(lease: AdapterLease) -> bool:
    return lease.head_rank > 0 or lease.head_rows > 0


def _token_ids(chunks: list[Chunk]) -> tuple[Int64s, Int64s, Int64s]:
    """Return token_ids, pending and pending_rows of the StepInput for these chunks."""
    ids, pending, pending_rows = list[int](), list[int](), list[int]()
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.draft is not None:
            ids += chunk.noise
            continue
        ids += sequence.tokens[chunk.start : chunk.end]
        if sequence.pending_rows:  # at most one: only the step before is not read yet
            pending.append(len(ids))
            pending_rows.append(sequence.pending_rows[0])
            ids += (0, *sequence.forced)
        ids += chunk.drafted
    return np.array(ids, np.int64), np.array(pending, np.int64), np.array(pending_rows, np.int64)


def _segments(leases: list[AdapterLease], lengths: Int64s) -> Int32s:
    """Return [3, segments] int32: slot, start and length of each adapter's non-empty segment.

    leases: adapters of the step's first chunks, one lease a chunk; equal slots are neighbours.
    lengths: number of rows of each chunk.
    """
    # The first chunks have the leases, in their order, so index i is the same in both.
    slots = np.array([lease.slot for lease in leases], np.int64)
    first = np.flatnonzero(np.diff(slots, prepend=-1))
    if not len(first):
        return np.zeros((3, 0), np.int32)
    sums = np.add.reduceat(lengths[: len(leases)], first)
    kept = sums > 0
    # Filtered before stacking: kernels need each of the three rows contiguous.
    parts = (part[kept] for part in (slots[first], sums.cumsum() - sums, sums))
    return np.stack(list(parts)).astype(np.int32)


def _upload_segments(
    segments: Int32s,
    max_rank: int,
    device: torch.device,
    max_rows: int = 0,
    *,
    changes_experts: bool = False,
    has_vectors: bool = False,
    composed: bool = False,
) -> Segments | None:
    if not segments.size:
        return None
    slots, starts, lengths = upload(segments, device).unbind()
    kinds = changes_experts, has_vectors, composed
    return Segments(slots, starts, lengths, max_rank, max_rows, *kinds)
