"""Parts of every linear, and of its LoRA weights, that each tensor parallel process keeps.

          q, k, v, gate, up, lm_head            o, down
    W     by output                             by input
    LoRA  A whole, B by output                  A by input, B whole

Each of q, k, v, gate, up and lm_head is divided separately, even if several are stored stacked;
q, k and v are divided at heads. For o and down, a process adds B·A·x of its inputs to its part of
the base product, and the all-reduce that the base product needs anyway sums both. Embeddings, with
their adapters, and the router of a mixture of experts are whole in every process; each expert's
gate, up and down are divided as an MLP's are. A delta net is divided at its key heads: in_proj_qkv,
z, b and a by output, out_proj by input; Mamba 2 at its groups or, where several processes share a
group, at its heads. Latent attention is divided at its heads: q_b_proj and kv_b_proj by output,
o_proj by input; q_a_proj and kv_a_proj_with_mqa are whole in every process. So are embeddings of
each layer, with their projections, gates and adapters: another division would need one more sum
over ranks in each layer.

A gated q_proj stores each head's query beside the gate of the head's output. A process reorders
them: first the gates of all its heads, then their queries, so that queries, keys and values lie
side by side in the product. BaseShape.parts gives this order, and the order of Qwen3-Next's fused
linears.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from lorikeet_engine.adapter_format import BaseShape, Linear
from lorikeet_engine.adapter_format.families import Parallel, Width
from lorikeet_engine.errors import SettingsError

_VOCABULARY_MULTIPLE = 8  # 16 bytes of 16-bit logits: products of other widths are slower


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Part of one linear that a tensor parallel process keeps.

    inputs: columns of W [d_out, d_in] and of A [rank, d_in].
    outputs: rows of W and of B [d_out, rank], in the order of the product's columns; several ranges
        if several linears are stored stacked as one, such as q, k and v.
    """

    inputs: range
    outputs: tuple[range, ...]

    @property
    def d_out(self) -> int:
        """Number of outputs that the process keeps."""
        return sum(map(len, self.outputs))

    @property
    def dims(self) -> tuple[int, int]:
        """(d_in, d_out) of the part that the process keeps."""
        return len(self.inputs), self.d_out

    def elements(self, rank: int) -> tuple[int, int]:
        """Return how many elements of A and of B the process keeps.

        rank: LoRA rank of the adapter.
        """
        return rank * len(self.inputs), rank * self.d_out


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a model's layers that one tensor parallel process computes.

    The first process keeps at least as much of everything as any other.

    index: index of the process.
    world: number of processes among which the layers are divided.
    """

    index: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.world

    def ranges(self, shape: BaseShape) -> tuple[ShardRange, ...]:
        """Return the part that this process keeps of each adaptable linear (BaseShape.modules).

        Raises SettingsError, whose `field` is tensor_parallel, if the base model cannot be divided
        among `world` processes.
        """
        return _ranges(self, shape)

    def rows(self, widths: tuple[Width, ...], shape: BaseShape) -> tuple[range, ...]:
        """Return the rows that this process keeps of a tensor in which several parts are stacked.

        widths: what the rows of each part are, such as rows of attention heads, in order.
        shape: shape of the whole base model.
        """
        return self._share(widths, shape)

    def part_of(self, shape: BaseShape) -> BaseShape:
        """Return the shape of the layers that this process computes.

        What every process keeps whole has its full size. Raises SettingsError if the base model
        cannot be divided among `world` processes.
        """
        self.ranges(shape)
        delta, full = shape.recurrent, shape.full
        return replace(
            shape,
            intermediate=shape.intermediate // self.world,
            shared_intermediate=shape.shared_intermediate // self.world,
            dense_intermediate=shape.dense_intermediate // self.world,
            wide_intermediate=shape.wide_intermediate // self.world,
            heads=shape.heads // self.world,
            kv_heads=max(1, shape.kv_heads // self.world),
            full=full and replace(full, kv_heads=max(1, full.kv_heads // self.world)),
            recurrent=delta
            and replace(
                delta,
                key_heads=max(1, delta.key_heads // self.world),
                value_heads=delta.value_heads // self.world,
            ),
        )

    def vocabulary(self, size: int) -> range:
        """Return the ids of the tokens whose logits this process computes.

        size: number of tokens in the vocabulary.
        """
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
        """Return the inputs, or the outputs, of a linear that this process keeps.

        widths: what these inputs or outputs are, such as attention heads; several, in order, for
            the outputs of linears that are stored stacked as one.
        shape: shape of the whole base model.
        """
        parts = shape.parts(widths[0])
        if parts:
            (width,) = widths
            pieces = self._run(width, shape)[:: shape.pieces(width)[1]]
            return tuple(range(at + p.start, at + p.stop) for p in parts for at in pieces)
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
        is_shared = width in (Width.KEYS, Width.FULL_KEYS) or (
            width is Width.DELTA_KEYS and shape.has_mamba
        )
        if is_shared and self.world > count and not self.world % count:
            last = first + 1  # several processes keep the same head: their queries read it
        elif count % self.world:
            raise SettingsError(
                f"{shape.key(width)}={count} cannot be shared evenly by {self.world} "
                "processes: choose a number of GPUs that divides it",
                field="tensor_parallel",
            )
        return range(first * each, last * each)


WHOLE = Shard()


@lru_cache(64)
def _ranges(shard: Shard, shape: BaseShape) -> tuple[ShardRange, ...]:
    """Compute the part that a process keeps of each of BaseShape.modules; cached, as every load
    of an adapter needs the same.
    """
    return tuple(shard._range(linear, shape) for linear in shape.modules)
