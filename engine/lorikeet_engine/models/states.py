"""States of fixed size that some layers keep for each sequence: their tensors, by slot."""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.delta_net import Ring
from lorikeet_engine.models.batch import StateRows


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """States of sequences in all layers with a delta net or a Mamba 2 mixer. Each running or cached
    state has a place of its own, its slot.

    inputs [layers, slots, convolution − 1, channels] in the model's dtype: the last inputs of the
        convolution; zeros stand for tokens before the first.
    matrices [layers, slots, value_heads, value_dim, key_dim]: state of each value head.
    ring: buffers of each slot's last tokens, which are not yet added to the matrices, with
        dimensions [layers, slots, …]; None: all tokens are added.
    """

    inputs: torch.Tensor
    matrices: torch.Tensor
    ring: Ring | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, each with dimensions [layers, slots, …]."""
        return [self.inputs, self.matrices, *(self.ring or ())]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(each.nbytes for each in self.tensors)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.inputs.shape[1]

    def begin(self, rows: StateRows) -> None:
        """Set the states of sequences that begin to zeros or cached states; copy states to the
        cache.

        rows: states that the next step reads and updates.
        """
        for states in self.tensors:
            for source, slot in rows.copies:
                states[:, slot].copy_(states[:, source])
            if len(rows.fresh):
                states[:, rows.fresh] = 0

    def layer(self, index: int) -> "RecurrentStates":
        """Return the states of one layer, without the first dimension.

        index: index of the layer among those with states.
        """
        ring = None if self.ring is None else self.ring.layer(index)
        return RecurrentStates(self.inputs[index], self.matrices[index], ring)
