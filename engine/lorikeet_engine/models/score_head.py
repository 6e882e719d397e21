"""Classification or reward head of a base model: the module `score`."""

from dataclasses import dataclass

import torch

from lorikeet_engine.adapter_format.families import SCORE
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.cut import Cut


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A model's own classification or reward head, W·h + b: W [labels, hidden] and perhaps b
    [labels], in the model's dtype.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def read(cls, checkpoint: Checkpoint, labels: int, hidden: int) -> "ScoreHead | None":
        """Read the head of a checkpoint; None if config.json names none.

        labels: number of labels that config.json names; 0 for none.

        Raises ModelError if the head has another shape, or is missing.
        """
        if not labels:
            return None
        weight, bias = f"{SCORE.module}.weight", f"{SCORE.module}.bias"
        return cls(
            checkpoint.read([weight], [labels], hidden),
            checkpoint.read_parts([bias], [Cut.whole(labels)]) if bias in checkpoint else None,
        )

    def values(self, states: torch.Tensor) -> torch.Tensor:
        """Return the values of hidden states [rows, hidden]: [rows, labels], in float32."""
        values = states.float() @ self.weight.float().T
        return values if self.bias is None else values + self.bias.float()
