"""Attention of heads of more than 256 elements, and to latents, on CUDA, by our Triton kernels."""

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention.paged_decode import PagedDecode, workspace_bytes
from lorikeet_engine.kernels.attention.paged_prefill import PagedPrefill
from lorikeet_engine.kernels.attention.prefixes import PlannedSequences, chosen_sequences
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences
from lorikeet_engine.kernels.fp8_kv import KvScales


class WideAttention:
    """AttentionBackend for heads that FlashInfer has no kernels for.

    PagedDecode computes sequences of one query token, unless a step has more of them than the
    largest captured CUDA graph takes; PagedPrefill computes all others.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._prefill = PagedPrefill(shape, device)
        self._decode: PagedDecode | None = None
        self._most_decodes = 0
        self._decode_rows: torch.Tensor | None = None
        self._decodes = PlannedSequences(np.zeros(1, np.int32), ())
        self._has_prompts = True

    def plan(self, batch: PagedSequences) -> None:
        """Prepare attention of a batch by PagedDecode, PagedPrefill or both, once per step."""
        is_decode = np.diff(batch.query_starts) == 1
        decodes, starts = int(is_decode.sum()), batch.query_starts[:-1]
        self._decode_rows, self._has_prompts = None, True
        if self._decode is None or not 0 < decodes <= self._most_decodes:
            self._prefill.plan(batch)
            return
        self._decode_rows = upload(starts[is_decode].astype(np.int64), self._device)
        self._decodes = chosen_sequences(batch, is_decode)
        self._decode.plan(self._decodes)
        self._has_prompts = decodes < len(is_decode)
        if self._has_prompts:
            self._prefill.plan(chosen_sequences(batch, ~is_decode), starts[~is_decode])

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
        """Compute attention by PagedDecode, PagedPrefill or both: see AttentionBackend.attend."""
        out, rows = q.new_empty(*q.shape[:2], self._shape.value_dim), self._decode_rows
        if self._has_prompts:
            self._prefill.attend(q, layer_kv, out, scales, window, group, sinks)
        if rows is None or self._decode is None:
            return out
        given = (layer_kv, self._decodes, scales, window, group, sinks)
        return out.index_copy_(0, rows, self._decode.attend(q[rows], *given))

    def captured(self, tokens: int, pages: torch.Tensor) -> PagedDecode:
        """Return a PagedDecode to capture in the CUDA graph for steps of up to `tokens` tokens."""
        needed = workspace_bytes(self._shape, tokens)
        if needed > len(self._workspace):
            self._workspace = self._workspace.new_empty(needed)
        captured = PagedDecode(self._shape, tokens, pages, self._workspace)
        if tokens >= self._most_decodes:  # steps run one after another, so they share buffers
            self._decode, self._most_decodes = captured, tokens
        return captured
