"""What a model asks of an attention back end, and the KV pages that it gives to it."""

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
    """How wide a head's keys lie in pages: as wide as CUDA's kernels want it, zeros behind it.

    head_dim: of the model; one that no kernel is for stays as it is.
    """
    if not device.startswith("cuda") or head_dim < _KERNEL_HEAD_DIMS[0]:
        return head_dim
    return next((width for width in _KERNEL_HEAD_DIMS if width >= head_dim), head_dim)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What every layer's attention has in common: heads, widths in elements, tokens of a page.

    dtype: of queries and outputs, and of keys and values unless they are FP8 (fp8_kv). windows: of
    each group of layers that share pages, None for none; groups of one window are neighbours.
    soft_cap: AttentionBackend.attend's. long_contexts: whether kernels for prompts that see much
    are worth the minute that compiling them takes.
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
    """KV pages of a step's sequences end to end: i's are pages[starts[i] : starts[i + 1]]; int32.

    On the host. kv_lengths: how many tokens of each sequence are in its pages: all that are in its
    cache, or, where layers have a window, the last of them, from the first of a page on.
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
        """The first pages of each sequence, arrays of typecode i, as many as its tokens need."""
        counts = -(-kv_lengths // page_size)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        # joined as bytes: 20 times as fast as an array of numpy's for each sequence
        used = [pages[:count] for pages, count in zip(tables, counts.tolist(), strict=True)]
        pages = np.frombuffer(bytearray().join(used), np.int32)
        assert len(pages) == starts[-1], "a sequence has too few KV pages"
        return cls(starts, pages, kv_lengths.astype(np.int32))


class PagedSequences(Protocol):
    """The part of a batch that attention reads: its fields are those of Batch.

    Implemented by Batch (models/batch.py).
    """

    @property
    def query_starts(self) -> npt.NDArray[np.int32]: ...  # noqa: D102

    @property
    def page_tables(self) -> tuple[PageTable, ...]: ...  # noqa: D102


class AttentionBackend(Protocol):
    """Causal attention of sequences whose keys and values lie in pages.

    Implemented by FlashInferAttention (flashinfer.py) for large steps on CUDA, PagedDecode
    (paged_decode.py) for small ones, and SdpaAttention (sdpa.py) for CPUs.
    """

    def plan(self, batch: PagedSequences) -> None:
        """Get ready for a batch, once before its first layer's attend."""
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
        """out[t] = softmax(q[t]·Kᵀ / √head_dim)·V over t's own sequence up to and including t.

        q [tokens, heads, head_dim], dense in a token; layer_kv [2, pages, page_size, kv_heads,
        head_dim or wider, see kv_head_dim], contiguous: keys and values, those of this step too. A
        sequence's queries are its last tokens. Slots that no sequence has written are never read.
        Query head h uses key head h // (heads / kv_heads). scales: of FP8 pages, by which their
        numbers are multiplied; None for pages in q's dtype. window: t sees that many tokens, itself
        and those right before it; None: all. group: whose page table it is, all of whose layers
        have this window. With the model's soft cap c, scores s become
        c · tanh(s / c) before the softmax. Returns a contiguous tensor like q.
        """
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A back end that CUDA graphs can hold. Implemented by FlashInferAttention (flashinfer.py)."""

    def captured(self, tokens: int, pages: torch.Tensor) -> AttentionBackend:
        """A back end for a graph over steps of up to `tokens` query tokens.

        What is captured after one plan follows the later ones; for rows of q beyond the planned
        tokens the result is left open.
        pages [groups, pages of all sequences of a step]: an int32 buffer; back ends may share it.
        """
        ...
