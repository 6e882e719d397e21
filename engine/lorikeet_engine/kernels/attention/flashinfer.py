"""Attention by FlashInfer's paged kernels: CUDA's back end, for prefill and decode in one batch.

FlashInfer's kernels run in large steps, between CUDA graphs or without any. A small step is a
single captured CUDA graph, whose attention is PagedDecode (paged_decode.py).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import flashinfer
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from lorikeet_engine.costs import SEEN_TO_SPLIT
from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention.hopper_prefill import HopperPrefill, pinned
from lorikeet_engine.kernels.attention.paged_decode import PagedDecode, workspace_bytes
from lorikeet_engine.kernels.attention.prefixes import (
    PlannedSequences,
    chosen_sequences,
    seen_by_each,
)
from lorikeet_engine.kernels.attention.protocol import (
    AttentionShape,
    PagedSequences,
    PageTable,
    kv_head_dim,
)
from lorikeet_engine.kernels.attention.sinks import add_sinks
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales


@dataclass(frozen=True, slots=True)
class _Split:
    """A step whose decoding sequences go to PagedDecode and whose prompt chunks go to FlashInfer.

    decode_rows, prompt_rows: int64 row indices into the query tensor q, on the device.
    decodes, prompts: the sequences to which these rows belong.
    """

    decode_rows: torch.Tensor
    prompt_rows: torch.Tensor
    decodes: PlannedSequences
    prompts: PlannedSequences

    @classmethod
    def of(
        cls, batch: PagedSequences, is_decode: npt.NDArray[np.bool_], device: torch.device
    ) -> Self:
        """Split a batch into decoding sequences and prompt chunks.

        is_decode [sequences]: whether a sequence has only one query token.
        """
        of_row = np.repeat(is_decode, np.diff(batch.query_starts))
        decode_rows, prompt_rows = np.flatnonzero(of_row), np.flatnonzero(~of_row)
        return cls(
            upload(decode_rows, device),
            upload(prompt_rows, device),
            chosen_sequences(batch, is_decode),
            chosen_sequences(batch, ~is_decode),
        )


class _GroupPages:
    """Page tables of several groups of layers that share one FlashInfer plan.

    used: device tensor that the plan reads; it holds the KV page numbers of the current group.
    """

    def __init__(self, tables: tuple[PageTable, ...], first: int, device: torch.device) -> None:
        """Upload the page tables of groups of layers, and make the first group the current one.

        tables: one page table for each group, all with equally many pages.
        first: index of the first of these groups among all groups of the model.
        """
        self._pages = upload(np.stack([table.pages for table in tables]), device)
        self._first, self._in_use = first, first
        self.used = self._pages[0].clone()

    def use(self, group: int) -> None:
        """Copy a group's KV page numbers to `used`, for the next attention launch."""
        if group != self._in_use:
            self.used.copy_(self._pages[group - self._first])
            self._in_use = group


class FlashInferAttention:
    """AttentionBackend for CUDA in float16 and bfloat16. A step is planned once for all layers.

    If layers differ in their windows, a step is planned once for each window.

    Small steps, each captured in one CUDA graph, use neither `plan` nor `attend`: `captured` gives
    their graphs a PagedDecode. If a step's prompts attend to many tokens, FlashInfer computes the
    prompts alone, and PagedDecode the step's decodes. On Hopper, with long contexts, HopperPrefill
    computes such prompts instead of FlashInfer, provided that PagedDecode has the capacity for the
    step's decodes.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Allocate the workspace, and start to compile the kernels, which are cached on disk.

        nvcc takes half a minute for each window. The compilation runs in the background; the first
        plan waits for it.
        """
        self._shape = shape
        self._kv_head_dim = kv_head_dim(shape.head_dim, device.type)
        self._workspace = torch.empty(
            _workspace_bytes(shape, device), dtype=torch.uint8, device=device
        )
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
            for window in dict.fromkeys(shape.windows)
        }
        self._group_pages: dict[int | None, _GroupPages] = {}
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._decode: PagedDecode | None = None
        self._most_decodes = 0
        self._split: _Split | None = None
        self._hopper = HopperPrefill.of(shape, self._workspace)
        self._planned_hopper: HopperPrefill | None = None
        compiler = ThreadPoolExecutor(1, thread_name_prefix="flashinfer")
        self._compiled = compiler.submit(self._compile, device)
        compiler.shutdown(wait=False)

    def _compile(self, device: torch.device) -> None:
        with torch.cuda.device(device):  # a new thread has the first device
            self._plan(_one_token(len(self._shape.windows)))
            self._planned.record()

    def plan(self, batch: PagedSequences) -> None:
        """Prepare attention of a batch, once per step, before the first layer's `attend`.

        The first call waits for the kernels to be compiled, and raises errors of compiling.
        """
        self._compiled.result()
        self._planned.synchronize()  # the next plan reuses the pinned buffer of the last
        is_decode = np.diff(batch.query_starts) == 1
        decodes, sees_much = is_decode.sum(), _prompts_see_much(batch, is_decode)
        self._split = None
        if sees_much and self._decode is not None and 0 < decodes <= self._most_decodes:
            self._split = _Split.of(batch, is_decode, self._workspace.device)
            self._decode.plan(self._split.decodes)
            batch, decodes = self._split.prompts, 0
        self._planned_hopper = None
        if sees_much and not decodes and self._hopper is not None and self._hopper.plan(batch):
            self._planned_hopper = self._hopper
        else:
            self._plan(batch)
        self._planned.record()

    def _plan(self, batch: PagedSequences) -> None:
        page_size, query_starts = self._shape.page_size, pinned(batch.query_starts)
        for window, wrapper in self._wrappers.items():
            table = batch.page_tables[self._shape.windows.index(window)]
            last_lengths = table.kv_lengths - (np.diff(table.starts) - 1) * page_size
            wrapper.plan(
                query_starts,
                pinned(table.starts),
                self._pages(batch, window),
                pinned(last_lengths),
                self._shape.heads,
                self._shape.kv_heads,
                self._kv_head_dim,
                page_size,
                causal=True,
                sm_scale=self._shape.score_scale,
                window_left=-1 if window is None else window - 1,  # without the token itself
                logits_soft_cap=self._shape.soft_cap,
                q_data_type=self._shape.dtype,
                kv_data_type=FP8_KV if self._shape.fp8_kv else self._shape.dtype,
                max_token_per_sequence=int(np.diff(batch.query_starts).max()),
                seq_lens=pinned(table.kv_lengths),
            )

    def _pages(self, batch: PagedSequences, window: int | None) -> torch.Tensor:
        first, groups = self._shape.windows.index(window), self._shape.windows.count(window)
        if groups == 1:
            return pinned(batch.page_tables[first].pages)
        tables = batch.page_tables[first : first + groups]
        pages = self._group_pages[window] = _GroupPages(tables, first, self._workspace.device)
        return pages.used

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
        """Compute attention of the planned batch in one layer: [tokens, heads, width of a value].

        group: index of the layer's group. sinks [heads]: one more logit of each head's softmax.
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        split = self._split
        if window in self._group_pages:
            self._group_pages[window].use(group)
        if split is None or self._decode is None:
            return self._run(q, layer_kv, scales, window, sinks, out)
        of_prompts = self._run(q[split.prompt_rows], layer_kv, scales, window, sinks)
        out.index_copy_(0, split.prompt_rows, of_prompts)
        of_decodes = self._decode.attend(
            q[split.decode_rows], layer_kv, split.decodes, scales, window, group, sinks
        )
        return out.index_copy_(0, split.decode_rows, of_decodes)

    def _run(
        self,
        q: torch.Tensor,
        layer_kv: torch.Tensor,
        scales: KvScales | None,
        window: int | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        missing = self._kv_head_dim - self._shape.head_dim
        if missing:  # zeros, as in the pages
            q, out = F.pad(q, (0, missing)), None
        result: Any
        if self._planned_hopper is not None:
            result = self._planned_hopper.attend(q, layer_kv, out)
        else:
            result = self._wrappers[window].run(
                q,
                (layer_kv[0], layer_kv[1]),
                k_scale=None if scales is None else scales.key,
                v_scale=None if scales is None else scales.value,  # another launch, unless 1.0
                out=out,
                return_lse=sinks is not None,
            )
            if sinks is not None:
                result, lse = result
                add_sinks(result, lse, sinks)
        mixed: torch.Tensor = result
        return mixed[..., :-missing].contiguous() if missing else mixed

    def captured(self, tokens: int, pages: torch.Tensor) -> PagedDecode:
        """Return a PagedDecode to capture in the CUDA graph for steps of up to `tokens` tokens.

        pages [groups, pages of all sequences of a step] int32: buffer for KV page numbers.
        """
        needed = workspace_bytes(self._shape, tokens)
        if needed > len(self._workspace):
            self._workspace = self._workspace.new_empty(needed)
        captured = PagedDecode(self._shape, tokens, pages, self._workspace)
        if tokens >= self._most_decodes:  # steps run one after another, so they share buffers
            self._decode, self._most_decodes = captured, tokens
        return captured


def _prompts_see_much(batch: PagedSequences, is_decode: npt.NDArray[np.bool_]) -> bool:
    """Return whether the prompts of a step attend to so many tokens that PagedDecode should compute
    the step's decodes.

    The limit is SEEN_TO_SPLIT tokens: the number that a prompt token attends to, summed over all
    prompt tokens, in the layers that attend to the most tokens.

    is_decode [sequences]: whether a sequence decodes; all others are prompts.
    """
    tables = np.stack([table.kv_lengths for table in batch.page_tables])
    seen = seen_by_each(np.diff(batch.query_starts), tables.max(axis=0))
    return bool(seen[~is_decode].sum() >= SEEN_TO_SPLIT)


def _workspace_bytes(shape: AttentionShape, device: torch.device) -> int:
    """Return the size of FlashInfer's workspace, which holds float32 partial results, in bytes.

    FlashInfer starts two blocks for each multiprocessor, each with a tile of at most 128 query rows
    of one head, and stores each row's sum of exponentials in addition to its values.
    """
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    rows = blocks // shape.kv_heads * shape.heads * 128
    width = kv_head_dim(shape.head_dim, device.type) + 1
    return max(128 << 20, 4 * rows * width + (1 << 20))


def _one_token(groups: int) -> PlannedSequences:
    """Return the smallest possible step, a single token, to compile kernels with.

    groups: number of groups of layers, each with its own page table.
    """
    starts, page = np.array([0, 1], np.int32), np.array([0], np.int32)
    return PlannedSequences(starts, (PageTable(starts, page, np.array([1], np.int32)),) * groups)
