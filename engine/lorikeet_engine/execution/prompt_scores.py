"""How likely the tokens of prompts are: what a step that computes them says of the next ones."""

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
    """What a step said of prompts. errors: of requests whose logits are not finite, by id."""

    outputs: list[PromptLogprobs]
    errors: Mapping[str, NotFinite]


class LogitsReader(Protocol):
    """What wants more logits of a step than its next tokens need.

    Implemented by PromptScores, and by a follower (follower.py), which has its part of them.
    """

    def compute(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Segments | None], torch.Tensor],
    ) -> None:
        """Launch what gives them. hidden: the step's last. logits_of: LlamaModel.logits."""
        ...


class PromptScores:
    """The scores of one step, on their way to the host once `compute` was called.

    LogprobReadback, which reads log probabilities of sampled tokens elsewhere, reads those of the
    prompts' next tokens here.
    """

    def __init__(self, chunks: list[Chunk], scored: list[ScoredRows], max_running: int) -> None:
        """chunks: the step's as laid out. max_running: no more rows of logits exist at once.

        As many are in the largest step anyway, for whose memory there is room.
        """
        self._chunks, self._piece_rows = chunks, min(_PIECE_ROWS, max_running)
        place = {chunk.sequence: at for at, chunk in enumerate(chunks)}
        self._scored = sorted(scored, key=lambda each: place[each.sequence])
        ends, rows = list(accumulate(chunk.length for chunk in chunks)), list[tuple[int, int]]()
        for each in self._scored:
            at = place[each.sequence]
            first = ends[at] - chunks[at].end  # the row of the prompt's token 0, were it here
            rows += [(first + token, at) for token in range(each.start, each.end)]
        self._rows, self._chunk_of = np.array(rows, np.int64).T  # of the hidden states; of chunks
        self._pieces: list[LogprobReadback] = []

    def inputs(self) -> list[LogitsInput]:
        """The inputs of the logits that `compute` asks for, in its order."""
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
        """Launch what gives the scores and copies them to the host, which waits for nothing.

        hidden [tokens, hidden]: the step's last hidden states. logits_of: LlamaModel.logits.
        """
        tokens = [t for each in self._scored for t in each.next_tokens]
        counts = [each.alternatives for each in self._scored for _ in each.next_tokens]
        device_tokens, at = upload(np.array(tokens, np.int64), hidden.device), 0
        for each in self.inputs():
            rows, heads = each.upload(hidden.device)
            logits = logits_of(hidden[rows], heads)
            piece = slice(at, at := at + len(rows))
            logprobs = LogprobReadback(logits, dict(enumerate(counts[piece])))
            logprobs.download(logits, device_tokens[piece])
            self._pieces.append(logprobs)

    def wait(self) -> ReadScores:
        """The scores of sequences that go on, once they are on the host."""
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
                errors[request.request_id] = NotFinite.under(request.adapter)
        return ReadScores([o for o in outputs if o.request_id not in errors], errors)
