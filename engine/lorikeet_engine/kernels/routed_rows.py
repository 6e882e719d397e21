"""What the operators of a mixture of experts pass to one another."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The rows of one layer's experts in one step: see kernels.moe for their order.

    weights [tokens, per_token] float32: of each pair, in falling order.
    pairs [rows] int32: which pair each row is; its token is pair // per_token.
    rows [tokens, per_token] int32: where each pair's row is.
    starts [experts + 1] int32: expert e has the rows starts[e] to starts[e + 1].
    """

    weights: torch.Tensor
    pairs: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor

    @property
    def per_token(self) -> int:
        """How many experts compute a token."""
        return self.weights.shape[1]
