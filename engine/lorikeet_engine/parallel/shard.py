"""Tensor parallelism: which part of every linear, and of its LoRA, each process keeps.

          q, k, v, gate, up, lm_head            o, down
    W     by output                             by input
    LoRA  A whole, B by output                  A by input, B whole

Each of q, k, v, gate, up and lm_head is cut on its own, at heads where it has them, also where some
are stored on top of one another. With o and down a process adds B A x of its inputs to its part of
the base product, and the sum over processes that the base product needs anyhow sums both.
Embeddings, and adapters of them, are whole everywhere.
So is the router of a mixture of experts, of each of which gate, up and down are cut like an MLP's.
"""

import math
from dataclasses import dataclass, replace

from lorikeet_engine.adapter_format import BaseShape, Linear
from lorikeet_engine.adapter_format.families import Parallel, Width
from lorikeet_engine.errors import SettingsError

_VOCABULARY_MULTIPLE = 8  # 16 bytes of 16-bit logits: products of other widths are slower


@dataclass(frozen=True, slots=True)
class ShardRange:
    """What a process keeps of one linear: columns of A [rank, d_in], rows of B [d_out, rank].

    outputs: several runs of a linear that stores several.
    """

    inputs: range
    outputs: tuple[range, ...]

    @property
    def d_out(self) -> int:
        """How many outputs are kept."""
        return sum(map(len, self.outputs))

    @property
    def dims(self) -> tuple[int, int]:
        """(d_in, d_out) of what is kept."""
        return len(self.inputs), self.d_out

    def elements(self, rank: int) -> tuple[int, int]:
        """The elements of A and of B that are kept."""
        return rank * len(self.inputs), rank * self.d_out


@dataclass(frozen=True, slots=True)
class Shard:
    """Process `index` of the `world` that compute the model's layers together; or the only one.

    The first keeps no less of anything than any other.
    """

    index: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.world

    def ranges(self, shape: BaseShape) -> tuple[ShardRange, ...]:
        """What is kept of each of the shape's modules.

        Raises SettingsError, whose `field` is tensor_parallel, when the base model cannot be cut
        so.
        """
        return tuple(self._range(linear, shape) for linear in shape.modules)

    def part_of(self, shape: BaseShape) -> BaseShape:
        """The shape of the layers that this process computes; what it replicates is as it was.

        Raises SettingsError when the base model cannot be cut so.
        """
        self.ranges(shape)
        return replace(
            shape,
            intermediate=shape.intermediate // self.world,
            heads=shape.heads // self.world,
            kv_heads=max(1, shape.kv_heads // self.world),
        )

    def vocabulary(self, size: int) -> range:
        """The tokens whose logits this process computes, of `size`."""
        each = -(-size // self.world)
        if self.world > 1:
            each = -(-each // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        return range(min(self.index * each, size), min((self.index + 1) * each, size))

    def _range(self, linear: Linear, shape: BaseShape) -> ShardRange:
        cut_inputs = self if linear.parallel is Parallel.ROW else WHOLE
        cut_outputs = self if linear.parallel is Parallel.COLUMN else WHOLE
        (inputs,) = cut_inputs._share((linear.inputs,), shape)
        return ShardRange(inputs, cut_outputs._share(linear.outputs, shape))

    def _share(self, widths: tuple[Width, ...], shape: BaseShape) -> tuple[range, ...]:
        """The process's elements of one side of a linear, on which these widths stand."""
        sizes = [math.prod(shape.pieces(width)) for width in widths]
        if self.world == 1:
            return (range(sum(sizes)),)
        kept, begin = [], 0
        for width, size in zip(widths, sizes, strict=True):
            run = self._run(width, shape)
            kept.append(range(begin + run.start, begin + run.stop))
            begin += size
        return tuple(kept)

    def _run(self, width: Width, shape: BaseShape) -> range:
        count, each = shape.pieces(width)
        if width is Width.VOCABULARY:
            return self.vocabulary(count)
        first, last = self.index * count // self.world, (self.index + 1) * count // self.world
        if width is Width.KEYS and self.world > count and not self.world % count:
            last = first + 1  # several processes keep the head that their queries read
        elif count % self.world:
            raise SettingsError(
                f"{shape.key(width)}={count} cannot be shared evenly by {self.world} "
                "processes: choose a number of GPUs that divides it",
                field="tensor_parallel",
            )
        return range(first * each, last * each)


WHOLE = Shard()
