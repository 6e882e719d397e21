"""Attention of chunks to what comes before them, by FlashInfer's FA3 kernels for Hopper."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import flashinfer
import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention.merge import merge
from lorikeet_engine.kernels.attention.prefixes import (
    Int32s,
    PlannedSequences,
    PrefixParts,
    cut_prefixes,
)
from lorikeet_engine.kernels.attention.protocol import (
    AttentionShape,
    PagedSequences,
    PageTable,
    kv_head_dim,
)

_HOPPER = (9, 0)


class PrefixAttention:
    """Attends to the whole pages before chunks, and merges that with what else they have seen."""

    def __init__(self, shape: AttentionShape, workspace: torch.Tensor) -> None:
        """Begin to compile the kernels, which takes nvcc about a minute, beside what else is done.

        workspace: bytes on the device, of which these kernels use none.
        """
        self._shape, self._device = shape, workspace.device
        gpu = torch.cuda.get_device_properties(self._device)
        self._programs = gpu.multi_processor_count
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa3"
        )
        self._tokens = self._places = torch.empty(0, device=self._device)
        compiler = ThreadPoolExecutor(1, thread_name_prefix="flashinfer-fa3")
        self._compiled = compiler.submit(self._compile)
        compiler.shutdown(wait=False)

    @classmethod
    def of(cls, shape: AttentionShape, workspace: torch.Tensor) -> Self | None:
        """For what it is made for: long contexts on Hopper, with pages of 16-bit numbers."""
        known = shape.long_contexts and shape.windows == (None,) and shape.soft_cap is None
        if not known or shape.fp8_kv:
            return None
        if torch.cuda.get_device_capability(workspace.device) != _HOPPER:
            return None
        return cls(shape, workspace)

    def _compile(self) -> None:
        length, page = self._shape.page_size + 1, np.array([0, 0], np.int32)
        table = PageTable(np.array([0, 2], np.int32), page, np.array([length], np.int32))
        one = PlannedSequences(np.array([0, 1], np.int32), (table,))
        with torch.cuda.device(self._device):  # threads begin with the first
            self._plan_parts(cut_prefixes(one, self._shape, self._programs))
            torch.cuda.current_stream().synchronize()  # its pinned buffer is free again

    def plan(self, batch: PagedSequences) -> PagedSequences:
        """Get ready for a batch; the batch without what is attended to here.

        What was planned before has reached the device. The first raises what compiling raised.
        """
        self._compiled.result()
        cut = cut_prefixes(batch, self._shape, self._programs)
        self._plan_parts(cut)
        self._tokens = upload(cut.tokens, self._device)
        self._places = upload(cut.places, self._device)
        return cut.own

    def _plan_parts(self, cut: PrefixParts) -> None:
        shape, table = self._shape, cut.parts.page_tables[0]
        self._wrapper.plan(
            pinned(cut.parts.query_starts),
            pinned(table.starts),
            pinned(table.pages),
            pinned(np.full(len(table.kv_lengths), shape.page_size, np.int32)),
            shape.kv_heads,
            shape.kv_heads,
            kv_head_dim(shape.head_dim, "cuda"),
            shape.page_size,
            causal=False,
            sm_scale=1.0 / math.sqrt(shape.head_dim),
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            max_token_per_sequence=int(np.diff(cut.parts.query_starts).max()),
            seq_lens=pinned(table.kv_lengths),
        )

    def add(
        self, q: torch.Tensor, layer_kv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> torch.Tensor:
        """Add the pages before the planned chunks to what their own gave: out, which is changed.

        q [tokens, heads, width of the pages' heads]; out, lse: as merge's own.
        """
        tokens, _, width = q.shape
        grouped = q.view(tokens, self._shape.kv_heads, -1, width).transpose(1, 2)
        queries = grouped.index_select(0, self._tokens).flatten(0, 1)
        parts, parts_lse = self._wrapper.run(
            queries, (layer_kv[0], layer_kv[1]), out=torch.empty_like(queries), return_lse=True
        )
        return merge(out, lse, parts, parts_lse, self._places, out)


def pinned(array: Int32s) -> torch.Tensor:
    """The array where copies to the device wait for no step in flight."""
    return torch.from_numpy(array).pin_memory()
