"""ModelRunner of the leading rank; it has the other ranks launch each of its steps."""

from dataclasses import dataclass
from typing import Any

import torch

from lorikeet_engine.execution.batch_builder import LogitsInput, StepInput
from lorikeet_engine.execution.prompt_scores import LogitsReader, PromptScores
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.parallel.followers import Followers, for_good
from lorikeet_engine.parallel.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class RunStep:
    """Command of the leader to its followers: launch a step's forward pass.

    previous_rows: number of tokens that the previous step sampled, if the leader broadcasts them
        before this step; 0 if the step does not need them.
    logits: tokens of prompts whose logits PromptScores needs, besides the logits for sampling.
    graphs: whether CUDA graphs may be used.
    """

    step: StepInput
    previous_rows: int
    logits: tuple[LogitsInput, ...]
    graphs: bool


class LeadingRunner(ModelRunner):
    """ModelRunner of the leader; it has the followers launch each of its steps.

    Once the followers know of a step, an error here is final (DeviceLost), since the followers wait
    for the leader in the step's all-reduces.
    """

    def __init__(self, group: RankGroup, followers: Followers, *parts: Any) -> None:
        """Create a ModelRunner that shares its steps.

        group: collective operations over all ranks.
        followers: the other ranks' processes.
        parts: arguments of ModelRunner: model, attention, weights, KV pages, graphs, states.
        """
        super().__init__(*parts)
        self._group, self._followers = group, followers

    def share(
        self,
        step: StepInput,
        previous: torch.Tensor | None = None,
        scores: PromptScores | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        """Have the followers launch a step. Raises DeviceLost after any error.

        Call right before the step's `forward`, or if `graphs` is False before its `forward_eager`.

        previous: tokens that the previous step sampled, on the device. The tokens are broadcast to
            the followers if the step has pending tokens.
        scores: prompt scores, which need logits besides those for sampling; None: no prompt is
            scored.
        graphs: whether CUDA graphs may be used.
        """
        tokens = previous if len(step.pending) else None
        rows = 0 if tokens is None else len(tokens)
        logits = tuple(scores.inputs()) if scores is not None else ()
        with for_good():
            self._followers.send(RunStep(step, rows, logits, graphs))
            if tokens is not None:
                self._group.broadcast_tokens(tokens)

    def forward(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] of batch.logit_rows; any error becomes DeviceLost."""
        with for_good():
            return super().forward(batch, scores)

    def forward_eager(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """Return the batch's logits without CUDA graphs; any error becomes DeviceLost."""
        with for_good():
            return super().forward_eager(batch, scores)
