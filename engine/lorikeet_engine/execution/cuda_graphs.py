"""CUDA graphs of steps: a few launches for a forward pass instead of some hundreds.

A step runs no Python code of the model's layers, except attention if the step is large:
`CudaGraphs.forward` copies the batch to the static tensors and replays the recorded graphs.

Without graphs the host needs 10 ms to launch a pass of 32 layers, with adapters about 40 ms. Passes
are captured for a ladder of sizes: tokens × segments of adapters. A mixture of experts has each
pass twice, for adapters that change experts and for others. All these passes are captured at start.
A pass for adapters with vectors (DoRA) or for compositions, which most replicas never compute, is
captured when the first step needs it. A step uses the smallest pass that is large enough; the rest
of the static tensors is padding, which writes no key and uses no adapter.

The graphs do not depend on the adapters of a step: each replay computes the list of tiles
(kernels/lora/tiles.py) from the static segments. The upper bound of the ranks is fixed at the
capture. Pages and lengths come through attention.plan.

A small step is one graph, since attention computes each token independently. A larger step is one
graph between every two attentions (piecewise_graphs.py). In a model with delta nets only steps of
decodes are one graph.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from lorikeet_engine.costs import SEEN_IN_PIECES
from lorikeet_engine.execution.piecewise_graphs import AttentionBuffers, PiecewiseGraphs
from lorikeet_engine.execution.state_buffers import StateBuffers
from lorikeet_engine.kernels.attention.prefixes import seen_by_each
from lorikeet_engine.kernels.attention.protocol import (
    AttentionBackend,
    CapturableAttention,
    PageTable,
)
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.models.states import RecurrentStates

_WHOLE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Sizes of piecewise passes. The small ones are for short chunks deep in a prompt, whose attention
# is too slow in a whole graph. Above 2,048 tokens the GPU takes longer than the host.
_PIECEWISE_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
_FEW_SEGMENTS = 8
_NO_KV_SLOT = -1  # KV slot of a padding token: its key and value are not written


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step.

    tokens: maximum number of tokens.
    sequences: maximum number of sequences.
    adapters: maximum number of distinct adapters.
    rank: maximum LoRA rank of an adapter.
    pages: maximum number of KV pages, in one group of layers, of all sequences together.
    """

    tokens: int
    sequences: int
    adapters: int
    rank: int
    pages: int


class _Pass(Protocol):
    """Captured forward pass over CudaGraphs' static tensors."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states of a batch whose contents are in the static tensors already."""


@dataclass(frozen=True, slots=True)
class _WholeGraph:
    """Forward pass captured as one CUDA graph, attention included."""

    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    attention: AttentionBackend

    def forward(self, batch: Batch) -> torch.Tensor:
        self.attention.plan(batch)
        self.graph.replay()
        return self.hidden


class _Adapters(NamedTuple):
    """Kind of batch that a pass is captured for, by its adapters.

    segments: largest number of adapter segments; 0 for batches without adapters.
    on_experts: whether the adapters may change linears of experts.
    vectors: whether the adapters may have DoRA's gains or biases (LoraWeights.vectors).
    composed: whether slots may be those of compositions, several adapters added up.
    """

    segments: int
    on_experts: bool
    vectors: bool
    composed: bool


_Ladder = dict[int, dict[_Adapters, _Pass]]
"""Captured passes by the largest number of tokens that they compute, which ascends, then by
adapters.
"""


class CudaGraphs:
    """Captured forward passes of one model, for steps of up to 2,048 tokens."""

    @torch.inference_mode()
    def __init__(
        self,
        model: LlamaModel,
        attention: CapturableAttention,
        weights: LoraWeights,
        kv: torch.Tensor,
        limits: StepLimits,
        states: RecurrentStates | None = None,
    ) -> None:
        """Capture the graphs, which takes some seconds.

        Graphs for adapters with DoRA or biases, and for compositions (several adapters added up),
        are captured when a batch first needs them.

        attention: makes the back ends that graphs of small steps contain; in larger steps, it is
            launched between graphs.
        weights: the adapters' weights that the ModelRunner uses.
        kv: the ModelRunner's KV pages.
        limits: largest step to capture graphs for.
        states: the ModelRunner's states of delta nets; None for a model without delta nets.
        """
        self._model, self._weights, self._kv, self._limits = model, weights, kv, limits
        self._states = states
        self._has_experts = model.config.experts_per_token > 0
        most_small = limits.tokens if states is None else limits.sequences
        small, large = _sizes(_WHOLE_SIZES, most_small), _sizes(_PIECEWISE_SIZES, limits.tokens)
        most, device = max(small[-1], large[-1]), kv.device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        groups = len(model.config.kv_groups.windows)
        self._kv_slots = torch.full((groups, most), _NO_KV_SLOT, dtype=torch.int64, device=device)
        counts = _segment_counts(min(limits.adapters, most))
        self._segments = torch.zeros(3, counts[-1], dtype=torch.int32, device=device)
        self._state_rows: StateBuffers | None = None
        if states is not None:
            self._state_rows = StateBuffers(most, limits.sequences, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        c = model.shape
        elements = large[-1] * c.heads * c.widest_head
        queries, outputs = torch.zeros(2, elements, dtype=model.dtype, device=device)
        latent = 0 if c.latents is None else c.latents.kv_rank
        self._buffers = AttentionBuffers(queries, outputs, latent)
        # While capturing, each token is a sequence of its own, with a page of its own.
        pages = torch.zeros(groups, max(limits.pages, small[-1]), dtype=torch.int32, device=device)
        self._attention = attention
        self._captured_attention = {
            size: attention.captured(size, pages) for size in reversed(small)
        }
        self._whole: _Ladder = {size: {} for size in small}
        self._piecewise: _Ladder = {size: {} for size in large}
        for ladder in (self._whole, self._piecewise):
            for size in reversed(ladder):  # the largest first: the others fit into its memory
                for held in self._captured_at_start(size, ladder):
                    ladder[size][held] = self._capture(size, held, ladder)

    @property
    def whole_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens for which a pass is captured as a single graph, ascending."""
        return tuple(self._whole)

    @property
    def piecewise_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens for which a pass is captured as graphs cut at attention, ascending."""
        return tuple(self._piecewise)

    def fit(self, batch: Batch) -> bool:
        """Whether a captured pass is large enough for this batch."""
        if batch.states is not None and not StateBuffers.fit(batch.states):
            return False
        return len(batch.token_ids) <= max(self._piecewise) or self._is_small(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Replay a captured pass for a batch that fits; return the hidden states of all its tokens.

        The next call may overwrite the returned tensor.
        """
        rows = len(batch.token_ids)
        ladder = self._whole if self._is_small(batch) else self._piecewise
        size = next(size for size in ladder if size >= rows)
        held = self._adapters_of(batch, size, ladder)
        if held not in ladder[size]:
            self._pad()
            ladder[size][held] = self._capture(size, held, ladder)
        self._fill(batch, rows)
        return ladder[size][held].forward(batch)[:rows]

    def _is_small(self, batch: Batch) -> bool:
        tokens = len(batch.token_ids)
        if tokens > max(self._whole):
            return False
        if batch.states is not None:
            return batch.states.prefills is None
        return _seen_by_prompts(batch) < SEEN_IN_PIECES

    def _fill(self, batch: Batch, rows: int) -> None:
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._kv_slots[:, :rows].copy_(batch.kv_slots)
        self._kv_slots[:, rows:].fill_(_NO_KV_SLOT)
        if batch.segments is not None:
            s, used = batch.segments, len(batch.segments)
            torch.stack((s.slots, s.starts, s.lengths), out=self._segments[:, :used])
            self._segments[:, used:].zero_()
        if batch.states is not None:
            assert self._state_rows is not None, "a batch with states of a model without them"
            self._state_rows.fill(batch.states)

    def _pad(self) -> None:
        """Fill the static tensors with padding, so that a capture changes no key and no state."""
        self._kv_slots.fill_(_NO_KV_SLOT)
        self._segments.zero_()
        if self._state_rows is not None:
            self._state_rows.pad()

    def _counts(self, size: int, ladder: _Ladder) -> tuple[int, ...]:
        """Return the numbers of adapter segments that passes of this size have, ascending.

        size: number of tokens of the passes.
        ladder: passes captured as one graph each, or as several that are cut at attention.
        """
        most = min(self._limits.adapters, size)
        return (
            _segment_counts(most) if ladder is self._whole else (0, min(_FEW_SEGMENTS, most), most)
        )

    def _captured_at_start(self, size: int, ladder: _Ladder) -> list[_Adapters]:
        """Return the kinds of batches to capture at the start: without vectors and compositions.

        size: number of tokens of the passes.
        ladder: passes captured as one graph each, or as several that are cut at attention.
        """
        kinds = (False, True) if self._has_experts else (False,)
        counts = self._counts(size, ladder)
        found = {(n, on_experts and n > 0, False, False) for n in counts for on_experts in kinds}
        return sorted(_Adapters(*each) for each in found)

    def _adapters_of(self, batch: Batch, size: int, ladder: _Ladder) -> _Adapters:
        """Return the kind with the fewest segments that this batch fits.

        size: number of tokens of the pass.
        ladder: passes captured as one graph each, or as several that are cut at attention.
        """
        segments = batch.segments
        if segments is None:
            return _Adapters(0, False, False, False)
        return _Adapters(
            next(n for n in self._counts(size, ladder) if n >= len(segments)),
            self._has_experts and segments.changes_experts,
            segments.has_vectors,
            segments.composed,
        )

    def _capture(self, size: int, held: _Adapters, ladder: _Ladder) -> _Pass:
        whole = ladder is self._whole
        blank = self._static_batch(size, held, whole=whole)
        if whole:
            return self._record(blank, self._captured_attention[size])
        return self._record_piecewise(blank, self._attention, self._buffers)

    def _static_batch(self, size: int, held: _Adapters, *, whole: bool) -> Batch:
        """Return a batch over the static tensors, for capturing a pass.

        size: number of tokens.
        held: adapters that the pass is captured for.
        whole: whether the pass is captured as a single graph.
        """
        segments = None
        if held.segments:
            slots, starts, lengths = self._segments[:, : held.segments].unbind()
            segments = Segments(
                slots,
                starts,
                lengths,
                self._limits.rank,
                changes_experts=held.on_experts,
                has_vectors=held.vectors,
                composed=held.composed,
            )
        each, ones = np.arange(size + 1, dtype=np.int32), np.ones(size, np.int32)
        table = PageTable(each, np.zeros(size, np.int32), ones)
        states = None
        if (rows := self._state_rows) is not None:
            states = rows.of_decodes(size) if whole else rows.of_any(size)
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_slots=self._kv_slots[:, :size],
            logit_rows=self._token_ids[:size],
            query_starts=each,
            kv_lengths=ones,
            page_tables=(table,) * len(self._kv_slots),
            segments=segments,
            states=states,
        )

    def _record(self, batch: Batch, attention: AttentionBackend) -> _Pass:
        attention.plan(batch)
        self._run(batch, attention)  # compiles and allocates: forbidden during capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # not torch.cuda.graph, which would give back the memory that steps use again
        with torch.cuda.stream(self._stream):
            # thread_local: loading threads may use the device meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                hidden = self._run(batch, attention)
            finally:  # else no later capture on this stream could begin
                graph.capture_end()
        return _WholeGraph(graph, hidden, attention)

    def _record_piecewise(
        self, batch: Batch, attention: AttentionBackend, buffers: AttentionBuffers
    ) -> _Pass:
        attention.plan(batch)
        self._run(batch, attention)
        torch.cuda.synchronize()
        return PiecewiseGraphs(
            partial(self._run, batch), attention, buffers, self._pool, self._stream
        )

    def _run(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Run the model's Python code, to compile kernels and to record graphs."""
        return self._model.forward(batch, self._kv, self._weights, attention, self._states)


def _sizes(ladder: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the sizes to capture: the ladder's sizes below `most`, and then `most`.

    If `most` is above the ladder's largest size, they are all sizes of the ladder.

    ladder: numbers of tokens, ascending.
    most: maximum number of tokens of a step.
    """
    return (*(size for size in ladder if size < most), min(most, ladder[-1]))


def _seen_by_prompts(batch: Batch) -> int:
    """Return the number of (prompt token, token that it attends to) pairs in the batch.

    If the batch runs as one graph, each prompt token reads the keys of all these tokens by itself.
    """
    lengths = np.diff(batch.query_starts)
    prompts = lengths > 1
    return int(seen_by_each(lengths[prompts], batch.kv_lengths[prompts]).sum())


def _segment_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of segments to capture: 0, 2, 8, 32, 64, 128, …; the last is ≥ `most`.

    The number of segments selects the LoRA kernels' launch parameters (Regime); a launch has
    programs for every segment, padding included.
    """
    counts = [0, 2]
    while counts[-1] < most:
        counts.append((4 if counts[-1] < 32 else 2) * counts[-1])
    return tuple(counts)
