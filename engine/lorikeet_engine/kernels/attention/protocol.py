"""Interface of attention back ends, and the page tables that they read."""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.kernels.fp8_kv import KvScales

_KERNEL_HEAD_DIMS = (64, 128, 256, 512)


def kv_head_dim(head_dim: int, device: str) -> int:
    """Return the width of a key's or value's head in KV pages.

    On CUDA, head_dim is padded to the next width that attention kernels support. On CPUs, and if no
    kernel is wide enough, head_dim is returned unchanged.

    head_dim: width of a head in the model.
    """
    if not device.startswith("cuda") or head_dim < _KERNEL_HEAD_DIMS[0]:
        return head_dim
    return next((width for width in _KERNEL_HEAD_DIMS if width >= head_dim), head_dim)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Properties of attention that all layers share.

    heads, kv_heads: numbers of query heads and of key heads.
    head_dim: elements of a head.
    page_size: tokens of a KV page.
    dtype: dtype of queries and outputs, and of keys and values unless fp8_kv.
    fp8_kv: whether keys and values are FP8.
    windows: window in tokens of each group of layers that share KV pages, None for no window;
        groups with the same window are neighbours.
    soft_cap: c in c · tanh(s / c), applied to attention scores s before the softmax; None: no cap.
    sinks: whether `attend` is called with sinks, one more logit in each head's softmax.
    long_contexts: whether to compile, which takes a minute, kernels for prompts that attend to many
        tokens.
    scale: factor of attention scores; None: 1 / √head_dim.
    latent: elements of each key that are its value, too, as in latent attention; 0: values are
        stored beside keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    fp8_kv: bool = False
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    sinks: bool = False
    long_contexts: bool = False
    scale: float | None = None
    latent: int = 0

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def value_dim(self) -> int:
        """Number of elements of a head's value."""
        return self.latent or self.head_dim

    @property
    def tail(self) -> int:
        """Number of elements of a key after its value, in latent attention; else 0."""
        return self.head_dim - self.value_dim


@dataclass(frozen=True, slots=True)
class PageTable:
    """KV pages of a step's sequences, concatenated; int32 arrays on the host.

    starts [sequences + 1]: sequence i has pages[starts[i] : starts[i + 1]].
    pages: page numbers.
    kv_lengths [sequences]: tokens in each sequence's pages. For layers without a window, these are
        all cached tokens; for layers with a window, those from the start of the first page that the
        window still needs.
    """

    starts: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    kv_lengths: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        tables: "Iterable[array[int]]",
        kv_lengths: npt.NDArray[np.integer[Any]],
        page_size: int,
    ) -> "PageTable":
        """Build the page table of sequences from each sequence's first pages, as many as hold its
        tokens.

        tables: each sequence's page numbers, arrays of typecode i; pages beyond its tokens are
            ignored.
        kv_lengths [sequences]: number of tokens of each sequence.
        page_size: tokens of a page.
        """
        counts = -(-kv_lengths // page_size)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        # joined as bytes: 20 times as fast as a NumPy array for each sequence
        used = [pages[:count] for pages, count in zip(tables, counts.tolist(), strict=True)]
        pages = np.frombuffer(bytearray().join(used), np.int32)
        assert len(pages) == starts[-1], "a sequence has too few KV pages"
        return cls(starts, pages, kv_lengths.astype(np.int32))


class PagedSequences(Protocol):
    """Fields of a batch that attention reads. Implemented by Batch (models/batch.py).

    query_starts [sequences + 1]: first query token of each sequence, then the number of all tokens.
    page_tables: KV pages of the sequences, one table for each group of layers.
    """

    @property
    def query_starts(self) -> npt.NDArray[np.int32]: ...  # noqa: D102

    @property
    def page_tables(self) -> tuple[PageTable, ...]: ...  # noqa: D102


class AttentionBackend(Protocol):
    """Causal attention of sequences whose keys and values are stored in pages.

    Implemented by FlashInferAttention (flashinfer.py) for large steps on CUDA, WideAttention
    (wide_heads.py) for heads that FlashInfer has no kernels for, PagedDecode (paged_decode.py) for
    small steps on CUDA, SdpaAttention (sdpa.py) for CPUs, and AttentionByHeads (by_heads.py) for
    models whose layers differ in their heads.
    """

    def plan(self, batch: PagedSequences) -> None:
        """Prepare attention of a batch, once per step, before the first layer's `attend`."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        layer_kv: torch.Tensor,
        batch: PagedSequences,
        scales: KvScales | None = None,
        window: int | None = None,
        group: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute out[t] = softmax(q[t]·Kᵀ · scale)·V over t's own sequence up to t itself.

        q [tokens, heads, head_dim], each token contiguous: the last tokens of each sequence
        layer_kv [2, pages, page_size, kv_heads, kv_head_dim(head_dim)], contiguous: keys and
          values, including this step's
        scales: factors that the numbers in FP8 pages are multiplied by; None: pages are in q's
          dtype
        window: number of tokens that t attends to: itself and the tokens right before it; None: all
        group: index of the layer's group, whose page table is read and whose layers all have
          `window`
        sinks [heads] float32: a logit more in each head's softmax, without a value; None: no sinks
        → [tokens, heads, head_dim] like q, contiguous

        With AttentionShape.latent, layer_kv is [1, pages, page_size, 1, head_dim], the first
        `latent` elements of a key are its value, and the result is [tokens, heads, latent].

        Query head h uses key head h // (heads / kv_heads). Page slots that no sequence has written
        are never read. The scale is 1 / √head_dim unless the model has another. With the model's
        soft cap c, scores s become c · tanh(s / c) before the
        softmax.
        """
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """Attention that CUDA graphs can capture: FlashInferAttention, WideAttention, or both."""

    def captured(self, tokens: int, pages: torch.Tensor) -> AttentionBackend:
        """Return a back end to capture in a CUDA graph for steps of up to `tokens` query tokens.

        A captured `attend` obeys each later call of the returned back end's `plan`. Results for
        rows of q beyond the planned tokens are undefined.

        pages [groups, pages of all sequences of a step] int32: buffer for KV page numbers, which
            back ends may share.
        """
        ...
