"""Log probabilities of prompt tokens, computed from the logits of a step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.errors import NotFinite
from lorikeet_engine.execution.batch_builder import LogitsInput, build_logits_input
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.request import PromptLogprobs
from lorikeet_engine.sampling.logprob_readback import LogprobReadback
from lorikeet_engine.scheduling.sequence import Chunk, ScoredRows, SequenceStatus

_PIECE_ROWS = 256  # with 128,256 tokens in the vocabulary, 131 MB of float32


@dataclass(frozen=True, slots=True)
class ReadScores:
    """Log probabilities of prompt tokens that a step computed, read by the host.

    errors: by request id, the error of requests whose logits are not finite.
    """

    outputs: list[PromptLogprobs]
    errors: Mapping[str, NotFinite]


class LogitsReader(Protocol):
    """Consumer of the logits that a step computes in addition to the logits for sampling.

    Implemented by PromptScores; by PooledPrompts (pooling.py), which reads hidden states alone; and
    by a follower (follower.py), which computes its part of these logits.
    """

    def compute(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Segments | None], torch.Tensor],
        /,
    ) -> None:
        """Launch the computation of the additional logits.

        hidden: [tokens, hidden], last hidden states of the step.
        logits_of: computes logits from hidden states and lm_head's LoRA segments
            (LlamaModel.logits).
        """
        ...


class PromptScores:
    """Scores of the prompts in one step, on their way to the host once `compute` was called.

    A score is the log probability of the next prompt token. LogprobReadback computes it, as it does
    for sampled tokens.
    """

    def __init__(self, chunks: list[Chunk], scored: list[ScoredRows], max_running: int) -> None:
        """Collect the prompt tokens to score.

        chunks: the step's chunks in the order of the batch; a sequence to score has one of them.
        scored: ranges of prompt tokens to score, each within its sequence's chunk.
        max_running: maximum number of sequences of a step, which is as many rows of logits as are
            computed at once.
        """
        self._chunks, self._piece_rows = chunks, min(_PIECE_ROWS, max_running)
        place = {chunk.sequence: at for at, chunk in enumerate(chunks)}
        self._scored = sorted(scored, key=lambda each: place[each.sequence])
        ends, rows = list(accumulate(chunk.length for chunk in chunks)), list[tuple[int, int]]()
        for each in self._scored:
            at = place[each.sequence]
            first = ends[at] - chunks[at].end  # row that token 0 of the prompt would have
            rows += [(first + token, at) for token in range(each.start, each.end)]
        # _rows: rows of the hidden states. _chunk_of: index of each row's chunk.
        self._rows, self._chunk_of = np.array(rows, np.int64).T
        self._pieces: list[LogprobReadback] = []

    def inputs(self) -> list[LogitsInput]:
        """Return the inputs for the logits of all tokens to score, in the order of `compute`."""
        pieces, chunks = list[LogitsInput](), len(self._chunks)
        for at in range(0, len(self._rows), self._piece_rows):
            piece = slice(at, at + self._piece_rows)
            of_chunks = np.bincount(self._chunk_of[piece], minlength=chunks)
            pieces.append(build_logits_input(self._chunks, self._rows[piece], of_chunks))
        return pieces

    @torch.inference_mode()
    def compute(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Segments | None], torch.Tensor],
    ) -> None:
        """Launch the scoring and the copies of the scores to the host. The host waits for nothing.

        hidden: [tokens, hidden], last hidden states of the step.
        logits_of: computes logits from hidden states and lm_head's LoRA segments
            (LlamaModel.logits).
        """
        tokens = [t for each in self._scored for t in each.next_tokens]
        counts = [each.alternatives for each in self._scored for _ in each.next_tokens]
        device_tokens, at = upload(np.array(tokens, np.int64), hidden.device), 0
        for each in self.inputs():
            rows, heads = each.upload(hidden.device)
            logits = logits_of(hidden[rows], heads)
            piece = slice(at, at := at + len(rows))
            logprobs = LogprobReadback(logits, dict(enumerate(counts[piece])))
            logprobs.download(logits, device_tokens[piece], ranked=True)
            self._pieces.append(logprobs)

    def wait(self) -> ReadScores:
        """Wait for the scores; return the scores of sequences that have not finished."""
        scores = (score for piece in self._pieces for score in piece.read().values())
        outputs, errors = list[PromptLogprobs](), dict[str, NotFinite]()
        for each in self._scored:
            logprobs, sequence = tuple(islice(scores, each.end - each.start)), each.sequence
            request = sequence.request
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if all(math.isfinite(score.logprob) for score in logprobs):
                outputs.append(PromptLogprobs(request.request_id, sequence.choice, logprobs))
            else:
                errors[request.request_id] = NotFinite.under(sequence.adapter)
        return ReadScores([o for o in outputs if o.request_id not in errors], errors)
