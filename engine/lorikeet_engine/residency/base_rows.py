"""The rows of the base model's linears, as vectors of adapters need them."""

from typing import NamedTuple, Protocol

import torch


class RowFacts(NamedTuple):
    """Sums of squares and biases of a linear's rows in one tensor parallel rank, in the order of
    the rank's outputs.

    squares [d_out] float32: of each row of W + B·A, the sum of squares over the rank's inputs; None
        if no A and B were given.
    bias [d_out] float32: the bias that the rank adds; None: the rank adds none.
    """

    squares: torch.Tensor | None
    bias: torch.Tensor | None


class BaseRows(Protocol):
    """Access to the rows (one for each output) of the base model's linears, with the values that
    are served: of quantised weights, the decoded ones. Thread-safe.
    """

    def facts(
        self,
        rank: int,
        layer: int,
        linear: int,
        a: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
    ) -> RowFacts:
        """Return facts of the rows of a linear that a rank keeps.

        rank: the tensor parallel rank.
        layer: index of the layer; BaseShape.outer_layer for lm_head and other linears outside
            layers.
        linear: index of the linear in BaseShape.modules.
        a, b: this tensor parallel rank's parts of A [LoRA rank, d_in] and of scaled, transposed B
            [LoRA rank, d_out], on the CPU; None if the squares are not needed.
        """
