"""Rows of the base model in all tensor parallel ranks, for the packing of adapters' vectors."""

from typing import NamedTuple

import numpy as np
import torch

from lorikeet_engine.models.served_rows import ServedRows
from lorikeet_engine.parallel.followers import Followers
from lorikeet_engine.residency.base_rows import RowFacts

Floats = np.ndarray | None


class RowAnswer(NamedTuple):
    """A follower's answer to a RowQuestion: facts of its rows of a linear.

    squares [d_out] float32: of each row of W + B·A, the sum of squares over the follower's inputs;
        None if the question has no A and B.
    bias [d_out] float32: the bias that the follower adds; None: it adds none.
    """

    squares: Floats
    bias: Floats


class RowQuestion(NamedTuple):
    """Question to a follower for facts of its rows, needed to pack DoRA's gains (an output is times
    1 + gain) and biases.

    layer: index of the decoder layer.
    linear: index of the linear in BaseShape.modules.
    a, b: the follower's parts of A and of scaled, transposed B; None if no squares are needed.
    """

    layer: int
    linear: int
    a: Floats
    b: Floats

    def answer(self, rows: ServedRows) -> RowAnswer:
        """Answer the question from the follower's part of the model."""
        a, b = (None if each is None else torch.from_numpy(each) for each in (self.a, self.b))
        facts = rows.facts(self.layer, self.linear, a, b)
        return RowAnswer(*(None if each is None else each.numpy() for each in facts))


class RankRows:
    """BaseRows of all ranks: rows of the base model's linears; followers answer for their own."""

    def __init__(self, own: ServedRows, followers: Followers | None) -> None:
        """Start without a question.

        own: rows of this process, which is rank 0.
        followers: processes of the other ranks; None without tensor parallelism.
        """
        self._own, self._followers = own, followers

    def facts(
        self,
        rank: int,
        layer: int,
        linear: int,
        a: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
    ) -> RowFacts:
        """Return, for a rank's part of a linear, its bias and each row's sum of squares in W + B·A.

        rank: the tensor parallel rank.
        layer: index of the decoder layer.
        linear: index of the linear in BaseShape.modules.
        a, b: the rank's parts of A [rank, d_in] and of scaled, transposed B [rank, d_out], on the
            CPU; None if no squares are needed.

        Raises DeviceLost if the rank's process is gone.
        """
        if rank == 0:
            return self._own.facts(layer, linear, a, b)
        assert self._followers is not None, "a rank without a process"
        sent = (None if each is None else each.float().numpy() for each in (a, b))
        answer: RowAnswer = self._followers.ask(rank, RowQuestion(layer, linear, *sent))
        return RowFacts(*(None if each is None else torch.from_numpy(each) for each in answer))
