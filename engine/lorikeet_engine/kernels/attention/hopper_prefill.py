"""Attention of prompts that attend to many tokens, by FlashInfer's FA3 kernels for Hopper.

Compared with FA2 on an H200, for Llama-3.1-8B's heads (`docs/benchmarks.md` at `2ecb28c8`), a chunk
of 2,048 tokens takes 0.56 of the time at the beginning of a prompt, and 0.64 if 122,880 tokens
precede it.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

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
    seen_by_each,
)
from lorikeet_engine.kernels.attention.protocol import (
    AttentionShape,
    PagedSequences,
    PageTable,
    kv_head_dim,
)

_HOPPER = (9, 0)
# Seen tokens of a step from which on prefixes are cut: parts and merging keep the host busy for
# 0.4 ms a layer, and the GPU needs as long for so many.
SEEN_TO_CUT = 1 << 22
_HEAD_DIM = 128  # measured; FlashInfer has kernels for 64 and 256 too


class HopperPrefill:
    """Attention of prompt chunks on Hopper, for models without sliding windows.

    If chunks are short, the keys before them are cut into parts, so that enough programs run at
    once to fill the GPU (prefixes.py).
    """

    def __init__(self, shape: AttentionShape, workspace: torch.Tensor) -> None:
        """Start to compile the kernels in the background, which takes nvcc about a minute.

        workspace: byte tensor on the device; FlashInfer's wrappers require one, but its FA3 kernels
            do not use it.
        """
        self._shape, self._device = shape, workspace.device
        gpu = torch.cuda.get_device_properties(self._device)
        self._programs = gpu.multi_processor_count
        self._causal, self._all_seen = (
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
            for _ in range(2)
        )
        self._cut: PrefixParts | None = None
        self._tokens = self._places = torch.empty(0, device=self._device)
        compiler = ThreadPoolExecutor(1, thread_name_prefix="flashinfer-fa3")
        self._compiled = compiler.submit(self._compile)
        compiler.shutdown(wait=False)

    @classmethod
    def of(cls, shape: AttentionShape, workspace: torch.Tensor) -> Self | None:
        """Return a HopperPrefill, or None if it does not support the model and GPU.

        HopperPrefill needs long contexts, a Hopper GPU, 16-bit KV pages with heads of 128
        elements, and a model without windows, soft cap or sinks.
        """
        if not shape.long_contexts or shape.windows != (None,) or shape.soft_cap is not None:
            return None
        if shape.sinks or shape.fp8_kv or kv_head_dim(shape.head_dim, "cuda") != _HEAD_DIM:
            return None
        if torch.cuda.get_device_capability(workspace.device) != _HOPPER:
            return None
        return cls(shape, workspace)

    def _compile(self) -> None:
        starts, one = np.array([0, 1], np.int32), np.array([1], np.int32)
        table = PageTable(starts, np.array([0], np.int32), one)
        with torch.cuda.device(self._device):  # a new thread has the first device
            self._plan(self._causal, PlannedSequences(starts, (table,)), self._shape.heads)
            torch.cuda.current_stream().synchronize()  # the plan's pinned buffer is free again

    def plan(self, batch: PagedSequences) -> bool:
        """Plan the attention of a batch.

        Returns False, without a plan, if FlashInfer's FA2 kernels are faster for this batch. The
        first call raises errors of compiling the kernels. Before each call, the caller must wait
        until the previous plan has been copied to the device.
        """
        self._compiled.result()
        cut = self._cut = cut_prefixes(batch, self._shape, self._programs)
        if cut is not None and _seen(batch) < SEEN_TO_CUT:
            return False
        self._plan(self._causal, batch if cut is None else cut.own, self._shape.heads)
        if cut is not None:
            self._plan(self._all_seen, cut.parts, self._shape.kv_heads)
            self._tokens = upload(cut.tokens, self._device)
            self._places = upload(cut.places, self._device)
        return True

    def _plan(self, wrapper: Any, batch: PagedSequences, heads: int) -> None:
        shape, table = self._shape, batch.page_tables[0]
        last_lengths = table.kv_lengths - (np.diff(table.starts) - 1) * shape.page_size
        wrapper.plan(
            pinned(batch.query_starts),
            pinned(table.starts),
            pinned(table.pages),
            pinned(last_lengths),
            heads,
            shape.kv_heads,
            _HEAD_DIM,
            shape.page_size,
            causal=wrapper is self._causal,
            sm_scale=shape.score_scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            max_token_per_sequence=int(np.diff(batch.query_starts).max()),
            seq_lens=pinned(table.kv_lengths),
        )

    def attend(
        self, q: torch.Tensor, layer_kv: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute causal attention of the planned batch in one layer; return it in q's shape.

        q: queries whose heads are padded to the width of the heads in KV pages.
        layer_kv [2, pages, page_size, kv_heads, kv_head_dim]: keys and values of the layer.
        out: contiguous tensor for the result; None: allocate one.
        """
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kv = layer_kv[0], layer_kv[1]
        if self._cut is None:
            whole: torch.Tensor = self._causal.run(q, kv, out=out)
            return whole
        own, own_lse = self._causal.run(q, kv, out=out, return_lse=True)
        grouped = q.view(len(q), self._shape.kv_heads, -1, _HEAD_DIM).transpose(1, 2)
        # made dense first: torch selects slowly from a strided tensor
        queries = grouped.contiguous().index_select(0, self._tokens).flatten(0, 1)
        parts, lse = self._all_seen.run(queries, kv, out=torch.empty_like(queries), return_lse=True)
        return merge(own, own_lse, parts, lse, self._places, own)


def _seen(batch: PagedSequences) -> int:
    return int(seen_by_each(np.diff(batch.query_starts), batch.page_tables[0].kv_lengths).sum())


def pinned(array: Int32s) -> torch.Tensor:
    """Copy an array to pinned memory, so that its upload does not wait for running steps."""
    return torch.from_numpy(array).pin_memory()
