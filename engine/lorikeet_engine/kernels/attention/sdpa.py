"""Attention by torch's scaled_dot_product_attention, one sequence at a time: CPU back end."""

import math
from itertools import pairwise

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.attention.protocol import PagedSequences
from lorikeet_engine.kernels.fp8_kv import KvScales


class SdpaAttention:
    """Attention by torch's operators, for all devices and any mix of prefill and decode."""

    def __init__(
        self, soft_cap: float | None = None, scale: float | None = None, latent: int = 0
    ) -> None:
        """Take fields of AttentionShape.

        soft_cap: c in c · tanh(s / c), applied to attention scores s; None: no cap.
        scale: factor of attention scores; None: 1 / √head_dim.
        latent: elements of each key that are its value, too; 0: values are stored apart.
        """
        self._soft_cap, self._scale, self._latent = soft_cap, scale, latent

    def plan(self, batch: PagedSequences) -> None:
        """Do nothing: this back end needs no plan."""

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
        """Compute attention one sequence after another: see AttentionBackend.attend."""
        out = q.new_empty(*q.shape[:2], self._latent or q.shape[2])
        table = batch.page_tables[group]
        of_all = torch.from_numpy(table.pages)
        owned, asked = pairwise(table.starts.tolist()), pairwise(batch.query_starts.tolist())
        sequences = zip(owned, asked, table.kv_lengths.tolist(), strict=True)
        for (first, last), (begin, end), length in sequences:
            pages = of_all[first:last].to(q.device)
            # cut at length: the rest of the last page was never written
            first_seen = 0 if window is None else max(0, length - (end - begin) + 1 - window)
            cached = layer_kv[:, pages].flatten(1, 2)[:, first_seen:length]
            keys = cached[0, ..., : q.shape[-1]]
            values = cached[-1, ..., : out.shape[-1]]  # of latent attention, keys begin with them
            if scales is not None:
                keys, values = keys.to(q.dtype), values.to(q.dtype)
            out[begin:end] = _attend_one(
                q[begin:end], keys, values, scales, window, self._soft_cap, sinks, self._scale
            )
        return out


def _attend_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KvScales | None,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Compute attention of one sequence's queries to its keys.

    q [queries, heads, head_dim]: the last tokens of the sequence
    keys [length, kv_heads, head_dim]
    values [length, kv_heads, head_dim, or less in latent attention]
    scales: factors of keys and values of FP8 pages; None: no factors
    window: number of tokens that a query attends to, itself included; None: all up to it
    soft_cap: c in c · tanh(s / c), applied to attention scores s; None: no cap
    sinks [heads]: a logit more in each head's softmax, without a value; None: no sinks
    scale: factor of attention scores; None: 1 / √head_dim
    → [queries, heads, width of a value] like q
    """
    queries, heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    group = heads // kv_heads
    # The query heads of a key head become rows of one matrix. So a decode reads each key once and
    # not once for each query head: three times as fast as enable_gqa.
    rows = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    rows = rows.reshape(1, kv_heads, group * queries, head_dim)
    mask = None
    if queries > 1:
        seen = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        seen = seen.tril(length - queries)
        if window is not None:
            seen = seen.triu(length - queries - window + 1)
        mask = seen.repeat(group, 1)  # [group * queries, length]
    if scales is not None:
        scale = scales.key * (1 / math.sqrt(head_dim) if scale is None else scale)
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    else:
        score = rows.float() @ keys.float().mT * (scale or 1 / math.sqrt(head_dim))
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if mask is not None:
            score = score.masked_fill(~mask, -math.inf)
        if sinks is not None:
            sink = sinks.view(1, kv_heads, group, 1).expand(-1, -1, -1, queries)
            score = torch.cat([score, sink.reshape(1, kv_heads, -1, 1)], dim=-1)
        out = score.softmax(-1)[..., :length].to(q.dtype) @ values
    if scales is not None:
        out *= scales.value
    out = out.view(kv_heads, group, queries, -1).permute(2, 0, 1, 3)
    return out.reshape(queries, heads, -1)
