"""Tensor parallelism: which part of every linear's LoRA each process keeps.

                     q, k, v, gate, up, lm_head   o, down
    sharded          A whole, B by output         A by input, B whole
    fully sharded    A by rank, B by output       A by input, B by output

Each of q, k, v, gate, up and lm_head is cut on its own, as the base model's fused products are, at
heads where it has them. With o and down a process adds B A x of its inputs to its part of the
base product, and the sum over processes that the base product needs anyhow sums both. Fully
sharded, v = A x is short and is exchanged before B: gathered where A is cut by rank, summed where
it is cut by input; outputs of o and down that B leaves to others arrive with the base product's
sum.
"""

import math
from dataclasses import dataclass

from lorikeet_engine.adapter_format import BaseShape, Linear
from lorikeet_engine.adapter_format.families import Parallel, Width
from lorikeet_engine.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ShardRange:
    """What a process keeps of one linear: columns of A [rank, d_in], rows of B [d_out, rank].

    Of A's rows it keeps every `stride`-th from `first` on.
    """

    inputs: range
    outputs: range
    first: int = 0
    stride: int = 1

    def a_rows(self, rank: int) -> range:
        """The rows of A that are kept; none where the rank is smaller than `first` + 1."""
        return range(self.first, rank, self.stride)

    def elements(self, rank: int) -> tuple[int, int]:
        """The elements of A and of B that are kept."""
        return len(self.a_rows(rank)) * len(self.inputs), rank * len(self.outputs)


@dataclass(frozen=True, slots=True)
class Shard:
    """Process `index` of the `world` that compute the model's layers together; or the only one.

    fully: cut both matrices of every linear, for less memory and one exchange of v more.
    """

    index: int = 0
    world: int = 1
    fully: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.world

    def ranges(self, shape: BaseShape) -> tuple[ShardRange, ...]:
        """What is kept of each of the shape's modules.

        Raises SettingsError when the base model cannot be cut so.
        """
        return tuple(self._range(linear, shape) for linear in shape.modules)

    def _range(self, linear: Linear, shape: BaseShape) -> ShardRange:
        if linear.parallel is Parallel.WHOLE:
            inputs = WHOLE._share((linear.inputs,), shape)
            return ShardRange(inputs, WHOLE._share(linear.outputs, shape))
        if linear.parallel is Parallel.ROW:
            b_shard = self if self.fully else WHOLE
            inputs = self._share((linear.inputs,), shape)
            return ShardRange(inputs, b_shard._share(linear.outputs, shape))
        # Every world-th row of A, not a run of rows: gathered and interleaved, v comes out in
        # order whatever the ranks in a batch are, and a rank need not be a multiple of the world.
        by_rank = (self.index, self.world) if self.fully else (0, 1)
        inputs = WHOLE._share((linear.inputs,), shape)
        return ShardRange(inputs, self._share(linear.outputs, shape), *by_rank)

    def _share(self, widths: tuple[Width, ...], shape: BaseShape) -> range:
        """The process's elements of one side of a linear."""
        if self.world == 1:
            return range(sum(math.prod(shape.pieces(width)) for width in widths))
        if len(widths) > 1:
            raise SettingsError(
                f"{shape.family}: a linear that stores several on top of one another cannot be "
                "shared by processes: choose one GPU"
            )
        count, each = shape.pieces(widths[0])
        first, last = self.index * count // self.world, (self.index + 1) * count // self.world
        if widths[0] is Width.KEYS and self.world > count and not self.world % count:
            last = first + 1  # several processes keep the head that their queries read
        elif count % self.world and widths[0] is not Width.VOCABULARY:
            raise SettingsError(
                f"{widths[0]}={count} cannot be shared evenly by {self.world} processes: choose a "
                "number of GPUs that divides it"
            )
        return range(first * each, last * each)


WHOLE = Shard()
