"""Interface of attention back ends, and the page tables that they read."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.kernels.fp8_kv import KvScales

_KERNEL_HEAD_DIMS = (64, 128, 256)


def kv_head_dim(head_dim: int, device: str) -> int:
    """Return the width of a head's keys in pages: head_dim padded to a width of CUDA's kernels.

    head_dim: the model's; returned unchanged for CPUs, and if no kernel fits.
    """
    if not device.startswith("cuda") or head_dim < _KERNEL_HEAD_DIMS[0]:
        return head_dim
    return next((width for width in _KERNEL_HEAD_DIMS if width >= head_dim), head_dim)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Properties of attention that all layers share.

    heads, kv_heads: query heads and key heads.
    head_dim: elements of a head.
    page_size: tokens of a page.
    dtype: of queries and outputs, and of keys and values unless fp8_kv.
    fp8_kv: whether keys and values are FP8.
    windows: window of each group of layers that share pages, in tokens, None for no window; groups
        with the same window are neighbours.
    soft_cap: c of c · tanh(s / c) for scores s (AttentionBackend.attend); None: no cap.
    long_contexts: whether kernels for prompts that see many tokens are worth a minute of compiling.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    fp8_kv: bool = False
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    long_contexts: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """KV pages of a step's sequences, laid end to end; int32 arrays on the host.

    starts [sequences + 1]: sequence i has pages[starts[i] : starts[i + 1]].
    pages: page numbers.
    kv_lengths [sequences]: tokens in each sequence's pages: all tokens of its cache, or, for layers
        with a window, the last of them, from the first token of a page on.
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
        """Take as many first pages of each sequence as its tokens need.

        tables: each sequence's pages, arrays of typecode i.
        kv_lengths [sequences]: tokens of each sequence.
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
    """Fields of a batch that attention reads. Implemented by Batch (models/batch.py)."""

    @property
    def query_starts(self) -> npt.NDArray[np.int32]: ...  # noqa: D102

    @property
    def page_tables(self) -> tuple[PageTable, ...]: ...  # noqa: D102


class AttentionBackend(Protocol):
    """Causal attention of sequences whose keys and values are stored in pages.

    Implemented by FlashInferAttention (flashinfer.py) for large steps on CUDA, PagedDecode
    (paged_decode.py) for small steps on CUDA, and SdpaAttention (sdpa.py) for CPUs.
    """

    def plan(self, batch: PagedSequences) -> None:
        """Prepare a batch, once before `attend` of its first layer."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        layer_kv: torch.Tensor,
        batch: PagedSequences,
        scales: KvScales | None = None,
        window: int | None = None,
        group: int = 0,
    ) -> torch.Tensor:
        """Compute out[t] = softmax(q[t]·Kᵀ / √head_dim)·V over t's own sequence up to t itself.

        q [tokens, heads, head_dim], dense in a token: a sequence's queries are its last tokens
        layer_kv [2, pages, page_size, kv_heads, kv_head_dim(head_dim)], contiguous: keys and
          values, this step's included
        scales: of FP8 pages, multiplied with their numbers; None: pages in q's dtype
        window: t sees this many tokens, itself and those right before it; None: all
        group: number of the layer's group, whose page table is read and whose layers have `window`
        → [tokens, heads, head_dim] like q, contiguous

        Query head h uses key head h // (heads / kv_heads). Page slots that no sequence has written
        are never read. With the model's soft cap c, scores s become c · tanh(s / c) before the
        softmax.
        """
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """Back end that can be captured in CUDA graphs. Implemented by FlashInferAttention."""

    def captured(self, tokens: int, pages: torch.Tensor) -> AttentionBackend:
        """Return a back end for a graph over steps of up to `tokens` query tokens.

        A captured `attend` follows every later plan. Results of rows of q beyond the planned tokens
        are undefined.

        pages [groups, pages of all sequences of a step] int32: buffer, which back ends may share.
        """
        ...
