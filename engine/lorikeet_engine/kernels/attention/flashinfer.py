"""Attention by FlashInfer's paged kernels: CUDA's back end, for prefill and decode in one batch.

A small step does not come here: it is one captured CUDA graph, whose attention is PagedDecode
(paged_decode.py). FlashInfer's kernels run in larger steps, between graphs or without any.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import flashinfer
import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.kernels.attention.paged_decode import PagedDecode, workspace_bytes
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences, PageTable

# Partial results of sequences that are split over several blocks of the GPU.
_WORKSPACE_BYTES = 128 << 20
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Sequences:
    """PagedSequences for one plan."""

    query_starts: Int32s
    kv_lengths: Int32s
    page_table: PageTable


class FlashInferAttention:
    """AttentionBackend for CUDA in float16 and bfloat16. A step is planned once for all layers.

    Small steps, each captured in one CUDA graph, use neither plan nor attend of this class:
    `captured` gives their graphs a PagedDecode.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Allocate the workspace, and begin to compile the kernels, which are kept on disk.

        nvcc takes half a minute for them, beside what else is done until the first plan.
        """
        self._shape = shape
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # FA2: FlashInfer's FA3 kernels would be a second set to compile and do not split a long
        # sequence.
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="fa2"
        )
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        compiler = ThreadPoolExecutor(1, thread_name_prefix="flashinfer")
        self._compiled = compiler.submit(self._plan, _one_token())
        compiler.shutdown(wait=False)

    def plan(self, batch: PagedSequences) -> None:
        """See AttentionBackend.plan. The first raises what compiling raised."""
        self._compiled.result()
        self._plan(batch)

    def _plan(self, batch: PagedSequences) -> None:
        page_size = self._shape.page_size
        table, lengths = batch.page_table, batch.kv_lengths
        last_lengths = lengths - (np.diff(table.starts) - 1) * page_size
        self._planned.synchronize()  # a plan is copied from a pinned buffer that the next reuses
        self._wrapper.plan(
            _pinned(batch.query_starts),
            _pinned(table.starts),
            _pinned(table.pages),
            _pinned(last_lengths),
            self._shape.heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            page_size,
            causal=True,
            q_data_type=self._shape.dtype,
            max_token_per_sequence=int(np.diff(batch.query_starts).max()),
            seq_lens=_pinned(lengths),
        )
        self._planned.record()

    def attend(self, q: torch.Tensor, layer_kv: torch.Tensor, _: PagedSequences) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._wrapper.run(q, (layer_kv[0], layer_kv[1]), out=out)
        return out

    def captured(self, tokens: int, pages: torch.Tensor) -> PagedDecode:
        """Give a graph of a small step its PagedDecode. See CapturableAttention.captured."""
        needed = workspace_bytes(self._shape, tokens)
        if needed > len(self._workspace):
            self._workspace = self._workspace.new_empty(needed)
        return PagedDecode(self._shape, tokens, pages, self._workspace)


def _one_token() -> _Sequences:
    """The smallest step there is."""
    starts, page = np.array([0, 1], np.int32), np.array([0], np.int32)
    return _Sequences(starts, np.array([1], np.int32), PageTable(starts, page))


def _pinned(array: Int32s) -> torch.Tensor:
    # from pageable memory each copy would wait for the step in flight
    return torch.from_numpy(array).pin_memory()
