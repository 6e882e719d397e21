"""Runner of the leader, which lets all ranks launch its steps."""

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
    """Command to launch a step's forward pass.

    previous_rows: rows of the step before, whose tokens the leader broadcasts first; 0 if not
        needed.
    logits: further logits, which PromptScores asks for.
    graphs: whether CUDA graphs may be used.
    """

    step: StepInput
    previous_rows: int
    logits: tuple[LogitsInput, ...]
    graphs: bool


class LeadingRunner(ModelRunner):
    """ModelRunner whose steps the followers launch, too.

    Once the followers know of a step, a failure here is final (DeviceLost): they wait in its sums.
    """

    def __init__(self, group: RankGroup, followers: Followers, *parts: Any) -> None:
        """Wrap a ModelRunner.

        parts: arguments of ModelRunner.
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
        """Have the followers launch a step, and broadcast the tokens of the step before if needed.

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
        """Do as ModelRunner.forward. Raises DeviceLost."""
        with for_good():
            return super().forward(batch, scores)

    def forward_eager(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """Do as ModelRunner.forward_eager. Raises DeviceLost."""
        with for_good():
            return super().forward_eager(batch, scores)
