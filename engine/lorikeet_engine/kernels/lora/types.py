"""Operands of the LoRA operators: adapter weights, a step's segments, and deltas of products."""

from dataclasses import dataclass
from typing import Any

import torch

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.routed_rows import RoutedRows


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Weights of all adapters on the device.

    arena [elements], in the adapter dtype: each adapter's packed A [rank, d_in] and transposed B
        [rank, d_out]. A of the embeddings is transposed, [vocabulary, rank]. LoRA's scaling is
        already inside B.
    table [slots, layers + 1, modules, 3] int64: for each slot, layer and linear, where A begins in
        the arena, where B begins, and the rank. A and B begin at multiples of 16 elements. Rank 0:
        the adapter does not change this linear. BaseShape defines the order of layers and modules.
        Of experts, the matrices follow one another; a number one higher than a multiple of 16 is
        the place of a matrix that all experts share.

    Trained embedding and head rows, which replace the base model's, are stored in the same way: A
    holds the rows [tokens, hidden], B [tokens, 3] the tokens' ids in base 256, lowest digit first,
    and the rank is the number of tokens, whose ids ascend. So is a classification head: A holds its
    weights [labels, hidden], B its biases [labels, 1], and the rank is the number of labels.

    vectors [slots, layers + 1, modules] int64: for each slot, layer and linear, where the linear's
        vectors begin in the arena, at a multiple of 16 elements; −1: it has none. They are gain
        [d_out], then bias [d_out]: the linear's output, LoRA included, becomes
        (1 + gain) · y + bias. None: no adapter has vectors.

    members [slots, MAX_MEMBERS] int32: slots of the adapters that each slot adds up, then −1s. The
        last slots are those of compositions, weighted sums of adapters, whose rows of the table are
        0: the ranks of their adapters follow one another as if they were one adapter's. A slot that
        holds an adapter has itself as its only member. None: there are no compositions.
    member_weights [slots, MAX_MEMBERS] float32: the weight of each member.
    """

    arena: torch.Tensor
    table: torch.Tensor
    vectors: torch.Tensor | None = None
    members: torch.Tensor | None = None
    member_weights: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Fused linear, such as qkv, and the layout of its outputs.

    linears: indices of the fused linears in the modules of LoraWeights.table, such as (0, 1, 2) for
        qkv.
    d_in: width of the input, which all fused linears share.
    d_outs: width of each linear's output, in the order in which the outputs lie side by side.
    """

    linears: tuple[int, ...]
    d_in: int
    d_outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of consecutive tokens that share an adapter (Punica's segments).

    Segments follow one another from token 0 on; tokens after the last segment have no adapter. For
    lm_head, which computes logits of selected tokens only, segments are runs of its rows instead.

    slots [segments] int32: each segment's adapter slot; a slot has at most one segment.
    starts [segments] int32: first token of each segment.
    lengths [segments] int32: number of tokens of each segment.
    max_rank: upper bound of the adapters' ranks.
    max_rows: for lm_head, upper bound of the head rows that one adapter replaces; 0 if none does.
    changes_experts: whether some adapter may change linears of experts.
    has_vectors: whether some adapter may have vectors, gains and biases of outputs
        (LoraWeights.vectors).
    composed: whether some slot may hold a composition, a weighted sum of adapters
        (LoraWeights.members).

    All tensors are contiguous and on the device that runs the step.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    max_rank: int
    max_rows: int = 0
    changes_experts: bool = True
    has_vectors: bool = False
    composed: bool = False

    def __len__(self) -> int:
        return self.slots.numel()


@dataclass(frozen=True, slots=True)
class LoraStep:
    """LoRA work of one forward pass.

    segments: tokens of each adapter.
    tiles: on CUDA, the LoRA kernels' work list (kernels.lora.tiles.Tiles); None on the CPU.
    """

    weights: LoraWeights
    segments: Segments
    tiles: Any


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """LoRA work of one layer's experts in a forward pass.

    routed: the layer's tokens, sorted by expert.
    owners [rows, 2] int32: slot of each routed row's adapter, −1 for none, and the row's expert.
    """

    step: LoraStep
    routed: RoutedRows
    owners: torch.Tensor


@dataclass(frozen=True, slots=True)
class UnexpandedDelta:
    """LoRA delta of a product before the multiplication by B: v = A·x.

    v [tokens, parts, slices, tiles.rank_stride] float32: output of `shrink` for this layer and
        group, in parts of d_in that are yet to be summed.
    tiles: the step's work list (kernels.lora.tiles.Tiles).
    layer, group: index of the layer, and its fused linears.
    has_vectors: whether adapters' vectors, gains and biases of outputs (LoraWeights.vectors), are
        to be applied to the product and its delta.
    """

    v: torch.Tensor
    weights: LoraWeights
    tiles: Any
    layer: int
    group: LoraGroup
    has_vectors: bool = False

    def vector_operands(self) -> tuple[Any, Any, Any]:
        """Return LoraWeights.vectors and its strides of slots and layers, or three Nones."""
        if not self.has_vectors:
            return None, None, None
        places = self.weights.vectors
        assert places is not None, "vectors without a table of them"
        return places, places.stride(0), places.stride(1)


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """LoRA delta B·A·x of a product, to be added by the operator that reads the product.

    rows [tokens, width], in the product's dtype: defined for the first `tokens` rows only.
    tokens [1] int32, on the device: number of rows to add.
    """

    rows: torch.Tensor
    tokens: torch.Tensor


def check_rows(name: str, rows: torch.Tensor, width: int, weights: LoraWeights) -> None:
    """Raise ShapeError unless `rows` is [tokens, width], with contiguous rows, on the adapters'
    device.

    name: name of the tensor, for the error message.
    """
    if rows.dim() != 2 or rows.shape[1] != width or rows.stride(1) != 1:
        raise ShapeError(
            f"{name} is {tuple(rows.shape)} with strides {rows.stride()}; "
            f"want [tokens, {width}] with neighbouring columns"
        )
    if rows.device != weights.arena.device:
        raise ShapeError(f"{name} is on {rows.device}, the adapters on {weights.arena.device}")


def check_group(weights: LoraWeights, group: LoraGroup) -> None:
    """Raise ShapeError unless the group's linears are neighbours in LoraWeights.table.

    The table must be contiguous, and the group must have an output width for each linear.
    """
    first, count = group.linears[0], len(group.linears)
    if group.linears != tuple(range(first, first + count)):
        raise ShapeError(f"a fused group's linears are neighbours in the table: {group.linears}")
    if len(group.d_outs) != count:
        raise ShapeError(f"{count} linears but {len(group.d_outs)} output widths")
    if first + count > weights.table.shape[2] or not weights.table.is_contiguous():
        raise ShapeError(f"linears {group.linears} in a table of {tuple(weights.table.shape)}")
