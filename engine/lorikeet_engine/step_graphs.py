"""CUDA graphs of small steps: one launch for a forward pass instead of some hundreds.

Without a graph the host needs 10 ms to launch a pass of 32 layers, with adapters some 40: far more
than the GPU needs for a few hundred tokens. A graph is captured for each of a ladder of sizes:
tokens × segments of adapters. A step uses the smallest that holds it, whether it decodes, begins
short prompts or both, since attention takes each token by itself; its tensors are copied to the
graph's buffers, and what is left over of them is padding that writes no key and uses no adapter.
"""

from dataclasses import dataclass

import torch

from lorikeet_engine.batch import Batch
from lorikeet_engine.kernels.attention import AttentionBackend, CapturableAttention
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models import Model

_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Tokens that all tokens of a step see, added up. Where prompts bring more, reading keys anew for
# each of their tokens costs more than launches: a decode of 256 sequences, 2.4 ms, has 70,000.
_SEEN = 1 << 18


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step can hold: tokens, distinct adapters, their rank, KV pages."""

    tokens: int
    adapters: int
    rank: int
    pages: int


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


class StepGraphs:
    """Forward passes of steps of few tokens."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        attention: CapturableAttention,
        weights: LoraWeights,
        kv: torch.Tensor,
        limits: StepLimits,
    ) -> None:
        """Capture all graphs, which takes some seconds; kv and weights are Runner's."""
        self._model, self._weights, self._kv, self._limits = model, weights, kv, limits
        sizes = [size for size in _TOKENS if size < limits.tokens]
        self._sizes = (*sizes, min(limits.tokens, _TOKENS[-1]))
        largest, device = self._sizes[-1], kv.device
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._kv_slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        counts = _segment_counts(min(limits.adapters, largest))
        self._segments = torch.zeros(3, counts[-1], dtype=torch.int32, device=device)
        # While capturing, each token is a sequence of its own, with a page of its own.
        pages = torch.zeros(max(limits.pages, largest), dtype=torch.int32, device=device)
        self._attention = {size: attention.captured(size, pages) for size in self._sizes}
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int], _Captured] = {}
        for size in reversed(self._sizes):  # from the largest: the others fit into its memory
            for count in _segment_counts(min(limits.adapters, size)):
                self._captured[size, count] = self._capture(size, count)

    def fit(self, batch: Batch) -> bool:
        """Whether a graph was captured for batches like this one."""
        tokens = len(batch.token_ids)
        if tokens > self._sizes[-1]:
            return False
        return tokens == len(batch.kv_lengths) or _seen(batch) <= _SEEN

    def forward(self, batch: Batch) -> torch.Tensor:
        """The hidden states of batch.logit_rows, of a batch that fits.

        The next forward may overwrite them.
        """
        rows = len(batch.token_ids)
        size = next(size for size in self._sizes if size >= rows)
        used = 0 if batch.segments is None else len(batch.segments)
        counts = _segment_counts(min(self._limits.adapters, size))
        count = next(count for count in counts if count >= used)
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._kv_slots[:rows].copy_(batch.kv_slots)
        self._kv_slots[rows:].fill_(-1)
        if batch.segments is not None:
            s = batch.segments
            torch.stack((s.slots, s.starts, s.lengths), out=self._segments[:, :used])
            self._segments[:, used:].zero_()
        self._attention[size].plan(batch)
        captured = self._captured[size, count]
        captured.graph.replay()
        hidden = captured.hidden[:rows]
        return hidden if len(batch.logit_rows) == rows else hidden[batch.logit_rows]

    def _capture(self, size: int, count: int) -> _Captured:
        segments = None
        if count:
            slots, starts, lengths = self._segments[:, :count].unbind()
            segments = Segments(slots, starts, lengths, self._limits.rank)
        batch = Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_slots=self._kv_slots[:size],
            query_starts=tuple(range(size + 1)),
            kv_lengths=(1,) * size,
            page_tables=torch.zeros(size, 1, dtype=torch.int32),
            logit_rows=self._token_ids[:size],
            segments=segments,
        )
        self._attention[size].plan(batch)
        return self._record(batch, self._attention[size])

    def _record(self, batch: Batch, attention: AttentionBackend) -> _Captured:
        self._run(batch, attention)  # compiles and allocates what capturing must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: loading threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._run(batch, attention)
        return _Captured(graph, hidden)

    def _run(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        return self._model.forward(batch, self._kv, self._weights, attention)


def _seen(batch: Batch) -> int:
    """At least as many as _SEEN is about."""
    begins, ends = batch.query_starts[:-1], batch.query_starts[1:]
    sequences = zip(begins, ends, batch.kv_lengths, strict=True)
    return sum((end - begin) * seen for begin, end, seen in sequences)


def _segment_counts(most: int) -> tuple[int, ...]:
    """0, 2, 8, 32, 64, 128, …: the last is at least `most`.

    A launch has programs for every segment, and by their number it takes its Regime. A step of 256
    tokens with 40 adapters loses 0.7 ms where it is padded to 128, nothing with fewer to 32.
    """
    counts = [0, 2]
    while counts[-1] < most:
        counts.append((4 if counts[-1] < 32 else 2) * counts[-1])
    return tuple(counts)
