"""RMS norms of a decoder: of hidden states, of products added to them, of queries and keys.

Also chooses how the ranks' parts of a product are summed (summed_product).
"""

from dataclasses import dataclass, replace

import torch

from lorikeet_engine.adapter_format import QkNormKind
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.lora.linear import Inputs, rows_of
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import (
    QkNorm,
    add_delta,
    add_rms_norm,
    mean_squares,
)
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.sums import RowExchange


@dataclass(frozen=True, slots=True)
class Product:
    """Output of a linear layer that is not yet added to the hidden states.

    y [tokens, width]: output without LoRA.
    lora: y's LoRA delta, not yet added to y; None: no adapter, or y contains the delta.
    norm_weight [width]: weight of a norm that is applied to y before it is added; None: no norm.
    exchange: memory for the sum over ranks of y and lora, which are this rank's parts; None: y is
        already complete.
    """

    y: torch.Tensor
    lora: LoraDelta | None = None
    norm_weight: torch.Tensor | None = None
    exchange: RowExchange | None = None


def summed_product(
    y: torch.Tensor,
    lora: LoraDelta | None,
    norm_weight: torch.Tensor | None,
    ranks: RankGroup | None,
) -> Product:
    """Sum the output of o_proj or down_proj over ranks (the all-reduce of tensor parallelism).

    Sums large outputs (RankSums.all_reduce); the kernel of the norm that reads the returned Product
    sums small ones (RowExchange).

    y [tokens, width]: this rank's part of the output.
    lora: LoRA delta of y; None: no adapter.
    norm_weight: weight of a norm that is applied to y before it is added; None: no norm.
    ranks: processes that have the other parts; None: y is already complete.
    """
    if ranks is None:
        return Product(y, lora, norm_weight)
    exchange = ranks.sums.exchange_for(y)
    if exchange is not None:
        return Product(y, lora, norm_weight, exchange)
    if lora is not None:
        add_delta(y, lora)
    ranks.sums.all_reduce(y)
    return Product(y, None, norm_weight)


class RmsNorm:
    """RMS norm y = x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32.

    In model families without a norm at this point of the layer, y = x.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        name: str | None,
        scalar: float | None = None,
    ) -> None:
        """Read the norm's weight.

        name: name of the norm in the checkpoint; None: the layer has no norm here.
        scalar: factor of x once a product is added to it; None: none.
        """
        self.eps = config.norm_eps
        self.scalar = scalar
        self.multiplier = config.residual_multiplier
        self.weight = read_norm_weight(config, checkpoint, name)

    def add_and_norm(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """Add a product, times the residual multiplier, to x in place, and return the norm of x.

        If there is a scalar, x becomes scalar · x after the addition.

        x [tokens, hidden]: hidden states.
        product: output of the linear layer before this norm.
        """
        return rows_of(self.inputs(x, product, rounded=False))

    def inputs(self, x: torch.Tensor, product: Product, *, rounded: bool) -> Inputs:
        """Add a product, times the residual multiplier, to x in place, then multiply x by the
        scalar, if any. Return the norm of x, as the input of a linear layer.

        x [tokens, hidden]: hidden states.
        product: output of the linear layer before this norm.
        rounded: whether to return the norm rounded to FP8 as well as unrounded. If the layer has no
            norm here, the result is x, unrounded.
        """
        return add_rms_norm(
            x, product.y, self.weight, self.eps, product.lora, self.multiplier,
            product.norm_weight, product.exchange, self.scalar,
            fp8=rounded and self.weight is not None,
        )  # fmt: skip


def read_norm_weight(
    config: ModelConfig, checkpoint: Checkpoint, name: str | None
) -> torch.Tensor | None:
    """Read a norm's weight [hidden]; return None if `name` is None.

    Raises ModelError if a tensor is missing or malformed.

    name: name of the tensor.
    """
    cut = Cut.whole(config.shape.hidden)
    return None if name is None else _weight(config, checkpoint, name, cut)


def read_layer_scalar(config: ModelConfig, checkpoint: Checkpoint, layer: int) -> float | None:
    """Read the factor of the hidden states after a layer; None if the model family has none.

    Raises ModelError if the tensor is missing or malformed.

    layer: index of the layer; None is returned for −1, before the first layer.
    """
    if not config.layer_scalars or layer < 0:
        return None
    name = f"model.layers.{layer}.layer_scalar"
    scalar = checkpoint.floats(name).flatten()
    if len(scalar) != 1 or not bool(scalar.isfinite()):
        raise ModelError(
            f"{checkpoint.folder}: tensor {name} is {scalar.tolist()}: want one number", field=name
        )
    return scalar.item()


def read_qk_norm(config: ModelConfig, checkpoint: Checkpoint, layer: int) -> QkNorm | None:
    """Read a layer's norm of this process's queries and keys; None if the model family has none.

    Raises ModelError if a tensor is missing or malformed.

    layer: index of the layer.
    """
    if config.qk_norm is QkNormKind.NONE:
        return None
    shape, cuts = config.shape, [Cut.whole(config.shape.heads_of(layer).head_dim)] * 2
    if config.qk_norm is QkNormKind.WHOLE:
        q, k = (checkpoint.shard.ranges(shape)[n] for n in shape.groups["qkv"][:2])
        widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        cuts = [Cut((widths[0],), q.outputs[0]), Cut((widths[1],), k.outputs[0])]
    query, *keys = (
        _weight(config, checkpoint, f"model.layers.{layer}.self_attn.{name}_norm", cut)
        for name, cut in zip("qk" if shape.kind(layer).has_kv else "q", cuts, strict=False)
    )
    key = keys[0] if keys else query  # of a layer without keys, which is not read
    return QkNorm(query, key, config.norm_eps, values=config.value_norm)


def shared_qk_norm(
    norm: QkNorm, ranks: RankGroup, qkv: torch.Tensor, kv_heads: int, lora: LoraDelta | None
) -> QkNorm:
    """Return `norm` with mean_squares set to the mean squares of each token's queries and keys over
    all ranks.

    Computes the part of this rank's heads, and sums the parts over ranks.

    qkv: this rank's queries, keys and values of each token, not yet normalised.
    kv_heads: number of this rank's heads of keys.
    lora: LoRA delta of qkv; None: no adapter.
    """
    squares = mean_squares(qkv, kv_heads, ranks.world, lora)
    ranks.sums.all_reduce(squares)
    return replace(norm, mean_squares=squares)


def _weight(config: ModelConfig, checkpoint: Checkpoint, name: str, cut: Cut) -> torch.Tensor:
    if config.norms_plus_one:
        return checkpoint.read_plus_one(f"{name}.weight", cut)
    return checkpoint.read_parts([f"{name}.weight"], [cut])
