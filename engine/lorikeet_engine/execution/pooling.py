"""Pooling of prompts: values of their last hidden states, in place of generated tokens.

The last token's hidden state h, behind the final norm, represents a prompt, or the mean of all
tokens' h. With a head, of the adapter or else of the base model, the values are W·h + b of the last
token, one for each label, as in transformers' …ForSequenceClassification.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from lorikeet_engine.adapter import AdapterRef, Pooling
from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.errors import NotFinite
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models.score_head import ScoreHead
from lorikeet_engine.request import Pooled
from lorikeet_engine.scheduling.sequence import Chunk, Sequence, SequenceStatus

_SCORE = -1  # the last of BaseShape.modules
_PIECE_ROWS = 256  # of heads, whose weights are gathered at once: with 8,192 columns 46 MB


@dataclass(frozen=True, slots=True)
class ReadPooled:
    """Embeddings or head's scores of the prompts that a step completed, read by the host.

    errors: by request id, the error of requests whose values are not finite.
    """

    outputs: list[Pooled]
    errors: Mapping[str, NotFinite]


class PooledPrompts:
    """Embeddings or head's scores of the prompts whose last tokens one step computes.

    `compute` launches the work, `wait` returns its results.

    Implements LogitsReader (prompt_scores.py).
    """

    def __init__(
        self, chunks: list[Chunk], weights: LoraWeights | None, score: ScoreHead | None
    ) -> None:
        """Collect the prompts whose last tokens the step computes, and the chunks of prompts whose
        mean is sought.

        chunks: the step's chunks in the order of the batch; the step pools at least one.
        weights: memory of the adapters' weights; may be None without adapters.
        score: the base model's own head, for prompts whose adapter has none; None without one.
        """
        ends = accumulate(chunk.length for chunk in chunks)
        pairs = [(chunk, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.pools]
        self._means = [pair for pair in pairs if _has_mean(pair[0].sequence)]
        others = [pair for pair in pairs if not _has_mean(pair[0].sequence)]
        self._plain = [pair for pair in others if not _labels(pair[0])]
        self._heads = [pair for pair in others if _labels(pair[0])]
        # Of a prompt that runs again after a preemption, tokens that were counted are left out.
        self._rows = [_uncounted(chunk, last) for chunk, last in self._means]
        for chunk, _ in self._means:
            kv = chunk.sequence.kv
            kv.score_from = max(kv.score_from or 0, chunk.end)
        self._weights, self._score = weights, score
        self._states: Download | None = None
        self._sums: Download | None = None
        self._scores: list[Download] = []

    @torch.inference_mode()
    def compute(
        self,
        hidden: torch.Tensor,
        _: Callable[[torch.Tensor, Segments | None], torch.Tensor],
    ) -> None:
        """Launch the pooling and the copies of the values to the host. The host waits for nothing.

        hidden: [tokens, hidden], last hidden states of the step.
        """
        if self._plain:
            rows = np.array([row for _, row in self._plain], np.int64)
            states = hidden[upload(rows, hidden.device)]
            pooled = states.float() if self._score is None else self._score.values(states)
            self._states = Download(pooled)
        if self._means:
            parts = (hidden[rows.start : rows.stop] for rows in self._rows)
            self._sums = Download(torch.stack([part.sum(0, dtype=torch.float32) for part in parts]))
        if not self._heads:
            return
        weights, width = self._weights, hidden.shape[1]
        assert weights is not None, "a head without adapter weights"
        columns = torch.arange(width, device=hidden.device)
        slots = [chunk.lease.slot for chunk, _ in self._heads if chunk.lease is not None]
        counts = [_labels(chunk) for chunk, _ in self._heads]
        numbers = np.concatenate([np.arange(count) for count in counts])
        owners = np.repeat(np.stack([[row for _, row in self._heads], slots], 1), counts, 0)
        facts = np.column_stack([owners, numbers])  # [labels of all heads, 3]
        for piece in torch.split(upload(facts, hidden.device), _PIECE_ROWS):
            row, slot, label = piece.unbind(1)
            a, b = weights.table[slot, -1, _SCORE, :2].unbind(1)  # of each adapter's head
            of_label = weights.arena[(a + label * width)[:, None] + columns]  # [labels, hidden]
            products = of_label.float() * hidden[row].float()
            self._scores.append(Download(products.sum(1) + weights.arena[b + label].float()))

    def wait(self) -> ReadPooled:
        """Wait for the results; return those of sequences that have not finished."""
        values = list[tuple[Chunk, torch.Tensor]]()
        if self._states is not None:
            values += zip((chunk for chunk, _ in self._plain), self._states.wait(), strict=True)
        if self._heads:
            chunks = [chunk for chunk, _ in self._heads]
            scores = torch.cat([piece.wait() for piece in self._scores])
            values += zip(chunks, torch.split(scores, [*map(_labels, chunks)]), strict=True)
        values += self._wait_for_means()
        outputs, errors = list[Pooled](), dict[str, NotFinite]()
        for chunk, each in values:
            sequence, request_id = chunk.sequence, chunk.sequence.request.request_id
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if each.isfinite().all():
                outputs.append(Pooled(request_id, sequence.choice, array("f", each.tolist())))
            else:
                errors[request_id] = NotFinite.under(sequence.adapter)
        return ReadPooled([each for each in outputs if each.request_id not in errors], errors)

    def _wait_for_means(self) -> list[tuple[Chunk, torch.Tensor]]:
        """Add the sums of the chunks to their sequences; return the means of completed prompts."""
        if self._sums is None:
            return []
        sums, means = self._sums.wait().double().numpy(), list[tuple[Chunk, torch.Tensor]]()
        for (chunk, _), part in zip(self._means, sums, strict=True):
            sequence = chunk.sequence
            whole = part if sequence.pooled is None else sequence.pooled + part
            sequence.pooled = whole
            if chunk.completes:
                means.append((chunk, torch.from_numpy(whole / sequence.prompt_length)))
        return means


def _has_mean(sequence: Sequence) -> bool:
    return sequence.request.pools is Pooling.MEAN


def _uncounted(chunk: Chunk, last: int) -> range:
    """Return the rows of a chunk's tokens that its prompt's mean does not count yet.

    last: row of the chunk's last token.
    """
    begin = max(chunk.start, chunk.sequence.kv.score_from or 0)
    return range(last + 1 - (chunk.end - begin), last + 1) if begin < chunk.end else range(0)


def _labels(chunk: Chunk) -> int:
    """Return the number of labels of a chunk's head; 0 without a head."""
    adapter = chunk.sequence.adapter
    head = adapter.head if isinstance(adapter, AdapterRef) else None
    return 0 if head is None else len(head.labels)
