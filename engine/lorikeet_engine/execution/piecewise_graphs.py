"""Forward pass as CUDA graphs between attentions, which are launched one by one.

For steps whose attention no graph can hold, since its kernels depend on the sequences. One graph
ends where a layer calls attention and the next begins there, so a pass of 32 layers is 33 graphs
and 32 launches of attention instead of about 400 launches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lorikeet_engine.kernels.attention.protocol import AttentionBackend, PagedSequences
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.models.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Inputs and outputs of attention between graphs, both [tokens, heads, head_dim].

    Passes may share them. A pass with queries of its own would hold them for every layer: 25 MB
    each, for 2,048 tokens of an 8B model.
    """

    queries: torch.Tensor
    outputs: torch.Tensor

    def first(self, tokens: int) -> "AttentionBuffers":
        """Return the buffers' part for a pass of fewer tokens."""
        return AttentionBuffers(self.queries[:tokens], self.outputs[:tokens])


class PiecewiseGraphs:
    """Captured forward pass of a fixed number of tokens."""

    def __init__(
        self,
        run: Callable[[AttentionBackend], torch.Tensor],
        attention: AttentionBackend,
        buffers: AttentionBuffers,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture `run`, a forward pass over static tensors whose kernels are compiled.

        attention: launched at every replay.
        pool: memory pool, which other passes may share.
        """
        self._attention, self._buffers = attention, buffers
        splitter = _GraphSplitter(buffers, pool)
        with torch.cuda.stream(stream):
            splitter.begin()
            self._hidden = run(splitter)
            self._last = splitter.end()
        self._pieces = splitter.pieces

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states for this batch, which the static tensors hold already."""
        buffers = self._buffers.first(len(batch.token_ids))
        self._attention.plan(batch)
        for piece in self._pieces:
            piece.graph.replay()
            mixed = self._attention.attend(
                buffers.queries, piece.layer_kv, batch, piece.scales, piece.window, piece.group
            )
            buffers.outputs.copy_(mixed)
        self._last.replay()
        return self._hidden


@dataclass(frozen=True, slots=True)
class _Piece:
    """Graph up to a layer's attention, and the arguments of that attention."""

    graph: torch.cuda.CUDAGraph
    layer_kv: torch.Tensor
    scales: KvScales | None
    window: int | None
    group: int


class _GraphSplitter:
    """AttentionBackend that ends one graph and begins the next where a layer calls attention."""

    def __init__(self, buffers: AttentionBuffers, pool: Any) -> None:
        self.pieces: list[_Piece] = []
        self._buffers, self._pool = buffers, pool

    def plan(self, batch: PagedSequences) -> None:
        """See AttentionBackend.plan."""

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: loading threads may use the device meanwhile
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        self._graph.capture_end()
        return self._graph

    def attend(
        self,
        q: torch.Tensor,
        layer_kv: torch.Tensor,
        _: PagedSequences,
        scales: KvScales | None = None,
        window: int | None = None,
        group: int = 0,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        self._buffers.queries.copy_(q)
        self.pieces.append(_Piece(self.end(), layer_kv, scales, window, group))
        self.begin()
        return self._buffers.outputs
