"""Rows of a mixture of experts after routing: the operand that `moe` and `lora` share."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows of one layer's experts in one step, in the order that kernels.moe defines.

    weights [tokens, per_token] float32: each pair's weight, in falling order.
    pairs [rows] int32: each row's pair; the row's token is pair // per_token.
    rows [tokens, per_token] int32: each pair's row.
    starts [experts + 1] int32: expert e has the rows starts[e] to starts[e + 1].
    """

    weights: torch.Tensor
    pairs: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor

    @property
    def per_token(self) -> int:
        """Number of experts that compute a token."""
        return self.weights.shape[1]
