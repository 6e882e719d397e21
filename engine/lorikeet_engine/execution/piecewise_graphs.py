"""Forward pass as CUDA graphs that end before each attention, which is launched separately.

Used for steps whose attention cannot be part of a graph, since its kernels depend on the sequences.
A pass of 32 layers is 33 graphs and 32 launches of attention.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lorikeet_engine.kernels.attention.protocol import AttentionBackend, PagedSequences
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.models.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Memory that passes attention's inputs and outputs from graph to graph.

    Both tensors have one dimension, with room for the largest step's elements in the layers with
    the widest heads. Captured passes may share them.

    latent: width of an output's head with latent attention; 0: as wide as a query's.
    """

    queries: torch.Tensor
    outputs: torch.Tensor
    latent: int = 0

    def of(self, tokens: int, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and outputs of a step's attention, each [tokens, *heads]; of latent
        attention, outputs are [tokens, query heads, latent].

        heads: (number of query heads, elements of a head).
        """
        queries, outputs = (tokens, *heads), (tokens, heads[0], self.latent or heads[1])
        return (
            self.queries[: math.prod(queries)].view(queries),
            self.outputs[: math.prod(outputs)].view(outputs),
        )


class PiecewiseGraphs:
    """Forward pass of a fixed number of tokens, one CUDA graph between every two attentions."""

    def __init__(
        self,
        run: Callable[[AttentionBackend], torch.Tensor],
        attention: AttentionBackend,
        buffers: AttentionBuffers,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture a forward pass.

        run: runs the forward pass over static tensors with the given attention. Its kernels must be
            compiled already.
        attention: launched at every replay.
        buffers: inputs and outputs of attention, which other passes may share.
        pool: memory pool of the graphs, which other passes may share.
        stream: stream on which the graphs are captured.
        """
        self._attention, self._buffers = attention, buffers
        splitter = _GraphSplitter(buffers, pool)
        with torch.cuda.stream(stream):
            splitter.begin()
            try:
                self._hidden = run(splitter)
            finally:  # else no later capture on this stream could begin
                self._last = splitter.end()
        self._pieces = splitter.pieces

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states of a batch whose contents are in the static tensors already."""
        tokens = len(batch.token_ids)
        self._attention.plan(batch)
        for piece in self._pieces:
            piece.graph.replay()
            queries, outputs = self._buffers.of(tokens, piece.heads)
            mixed = self._attention.attend(
                queries, piece.layer_kv, batch, piece.scales, piece.window, piece.group,
                piece.sinks,
            )  # fmt: skip
            outputs.copy_(mixed)
        self._last.replay()
        return self._hidden


@dataclass(frozen=True, slots=True)
class _Piece:
    """CUDA graph that ends before a layer's attention, and the arguments for calling that
    attention.

    heads: (number of query heads, elements of a head).
    """

    graph: torch.cuda.CUDAGraph
    heads: torch.Size
    layer_kv: torch.Tensor
    scales: KvScales | None
    window: int | None
    group: int
    sinks: torch.Tensor | None


class _GraphSplitter:
    """AttentionBackend that ends one graph and begins the next where a layer calls attention."""

    def __init__(self, buffers: AttentionBuffers, pool: Any) -> None:
        self.pieces: list[_Piece] = []
        self._buffers, self._pool = buffers, pool

    def plan(self, batch: PagedSequences) -> None:
        """Do nothing: the graphs that this object records do not contain attention."""

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
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """End a graph before attention, and begin the next.

        Returns the buffer that holds attention's output when the next graph is replayed. Keeps the
        arguments, which are AttentionBackend.attend's, for calling attention at each replay.
        """
        queries, outputs = self._buffers.of(len(q), q.shape[1:])
        queries.copy_(q)
        self.pieces.append(_Piece(self.end(), q.shape[1:], layer_kv, scales, window, group, sinks))
        self.begin()
        return outputs
