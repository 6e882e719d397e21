"""Attention by FlashInfer's paged kernels: CUDA's back end, for prefill and decode in one batch."""

from dataclasses import dataclass

import flashinfer
import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.kernels.attention.kv_write import write_kv
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences

# Partial results of sequences split over several blocks of the GPU. A captured plan assumes the
# worst: 84 MB for 256 sequences of 32 heads of 128.
_WORKSPACE_BYTES = 256 << 20


class FlashInferAttention:
    """AttentionBackend for CUDA in float16 and bfloat16. A step is planned once for all layers."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Allocate the workspace; the kernels are compiled at the first plan and kept on disk."""
        self._shape = shape
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans = _Plans(shape, _wrapper(self._workspace))

    def plan(self, batch: PagedSequences) -> None:
        """See AttentionBackend.plan."""
        self._plans.plan(batch)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_kv: torch.Tensor,
        batch: PagedSequences,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        return self._plans.attend(q, k, v, layer_kv, batch)

    def captured(self, sequences: int, pages: torch.Tensor) -> "_Plans":
        """See CapturableAttention.captured."""
        counts = torch.empty(3, sequences + 1, dtype=torch.int32, device=pages.device)
        wrapper = _wrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr_buf=counts[0],
            paged_kv_indptr_buf=counts[1],
            paged_kv_last_page_len_buf=counts[2, :-1],
            paged_kv_indices_buf=pages,
        )
        return _Plans(self._shape, wrapper)


class _Plans:
    """One wrapper of FlashInfer and what keeps its plans from overwriting one another."""

    def __init__(
        self, shape: AttentionShape, wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper
    ) -> None:
        self._shape = shape
        self._wrapper = wrapper
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, batch: PagedSequences) -> None:
        table = _PageTable.of(batch, self._shape.page_size)
        self._planned.synchronize()  # a plan is copied from a pinned buffer that the next reuses
        self._wrapper.plan(
            torch.tensor(batch.query_starts, dtype=torch.int32),
            torch.from_numpy(table.starts),
            torch.from_numpy(table.pages),
            torch.from_numpy(table.last_lengths),
            self._shape.heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            self._shape.page_size,
            causal=True,
            q_data_type=self._shape.dtype,
            max_token_per_sequence=int(np.diff(batch.query_starts).max()),
            seq_lens=torch.tensor(batch.kv_lengths, dtype=torch.int32),
        )
        self._planned.record()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_kv: torch.Tensor,
        batch: PagedSequences,
    ) -> torch.Tensor:
        write_kv(k, v, layer_kv, batch.kv_slots)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._wrapper.run(q, (layer_kv[0], layer_kv[1]), out=out)
        return out


@dataclass(frozen=True, slots=True)
class _PageTable:
    """Page tables end to end: sequence i's are pages[starts[i] : starts[i + 1]], all int32."""

    starts: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    last_lengths: npt.NDArray[np.int32]

    @classmethod
    def of(cls, batch: PagedSequences, page_size: int) -> "_PageTable":
        lengths = np.array(batch.kv_lengths, np.int32)
        counts = -(-lengths // page_size)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        table = batch.page_tables.numpy()
        used = np.arange(table.shape[1]) < counts[:, None]
        return cls(starts, table[used], lengths - (counts - 1) * page_size)


def _wrapper(
    workspace: torch.Tensor, **buffers: object
) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    # A decode is a prefill of one token: one kernel for every batch. FlashInfer's FA3 kernels
    # would be a second set to compile and do not split a long sequence.
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", backend="fa2", **buffers
    )
