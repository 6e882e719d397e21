"""Attention of models whose layers differ in their heads: a back end for each kind of heads."""

from collections.abc import Sequence

import torch

from lorikeet_engine.kernels.attention.prefixes import PlannedSequences
from lorikeet_engine.kernels.attention.protocol import (
    AttentionBackend,
    CapturableAttention,
    PagedSequences,
)
from lorikeet_engine.kernels.fp8_kv import KvScales


class AttentionByHeads:
    """AttentionBackend for models whose layers differ in their heads: a back end for each kind."""

    def __init__(self, backends: Sequence[tuple[range, AttentionBackend]]) -> None:
        """Combine back ends for models whose groups of layers need different ones.

        backends: pairs of a range of groups of layers and their back end, in the order of groups.
        """
        self._backends = backends
        self._planned = list[PlannedSequences]()

    def plan(self, batch: PagedSequences) -> None:
        """Prepare each back end for a batch, once per step, before the first `attend`."""
        self._planned = [_of_groups(batch, groups) for groups, _ in self._backends]
        for (_, backend), planned in zip(self._backends, self._planned, strict=True):
            backend.plan(planned)

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
        """Compute a layer's attention with its group's back end: [tokens, heads, width of a value].

        group: index of the layer's group. sinks [heads]: one more logit of each head's softmax.
        """
        index = next(i for i, (groups, _) in enumerate(self._backends) if group in groups)
        groups, backend = self._backends[index]
        given = (layer_kv, self._planned[index], scales, window, group - groups.start, sinks)
        return backend.attend(q, *given)


class CapturableByHeads(AttentionByHeads):
    """AttentionByHeads whose back ends can all be captured in CUDA graphs."""

    def __init__(self, backends: Sequence[tuple[range, CapturableAttention]]) -> None:
        """Combine back ends for models whose groups of layers need different ones.

        backends: pairs of a range of groups of layers and their back end, in the order of groups.
        """
        super().__init__(backends)
        self._capturable = backends

    def captured(self, tokens: int, pages: torch.Tensor) -> AttentionByHeads:
        """Return back ends to capture in a CUDA graph for steps of up to `tokens` query tokens.

        pages [groups, pages of all sequences of a step] int32: buffer for KV page numbers.
        """
        return AttentionByHeads(
            [
                (groups, backend.captured(tokens, pages[groups.start : groups.stop]))
                for groups, backend in self._capturable
            ]
        )


def _of_groups(batch: PagedSequences, groups: range) -> PlannedSequences:
    return PlannedSequences(batch.query_starts, batch.page_tables[groups.start : groups.stop])
