"""The leader's runner, whose steps all ranks launch."""

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
    """Launch a step's forward pass.

    previous_rows: rows of the step before, whose tokens come from the leader first; 0: none are
    needed. logits: what PromptScores asks for besides. graphs: whether CUDA graphs may be used.
    """

    step: StepInput
    previous_rows: int
    logits: tuple[LogitsInput, ...]
    graphs: bool


class LeadingRunner(ModelRunner):
    """A ModelRunner whose steps the followers launch, too.

    Once they know of a step, what fails here fails for good: they wait in its sums.
    """

    def __init__(self, group: RankGroup, followers: Followers, *parts: Any) -> None:
        """parts: ModelRunner's."""
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
        """Have the followers launch a step, with the tokens of the step before if it needs them.

        Raises DeviceLost.
        """
        tokens = previous if len(step.pending) else None
        rows = 0 if tokens is None else len(tokens)
        logits = tuple(scores.inputs()) if scores is not None else ()
        with for_good():
            self._followers.send(RunStep(step, rows, logits, graphs))
            if tokens is not None:
                self._group.broadcast_tokens(tokens)

    def forward(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """ModelRunner.forward. Raises DeviceLost."""
        with for_good():
            return super().forward(batch, scores)

    def forward_eager(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """ModelRunner.forward_eager. Raises DeviceLost."""
        with for_good():
            return super().forward_eager(batch, scores)
