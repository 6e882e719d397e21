"""Tokens of a mixture of experts after routing: the operand that `moe` and `lora` share."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Tokens of one layer in one step, sorted by expert.

    A pair is a token and one of the per_token experts chosen for it. Each pair has a row; rows are
    sorted by expert, then by token (kernels.moe).

    weights [tokens, per_token] float32: the weights of each token's experts.
    pairs [rows] int32: index of each row's pair: token · per_token + j for a token's j-th expert.
    rows [tokens, per_token] int32: row of each pair.
    experts [tokens, per_token] int32: the experts of each token, in the order of choice.
    starts [experts + 1] int32: expert e has the rows from starts[e] to before starts[e + 1].
    """

    weights: torch.Tensor
    pairs: torch.Tensor
    rows: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor

    @property
    def per_token(self) -> int:
        """Number of experts that are chosen for a token."""
        return self.weights.shape[1]
