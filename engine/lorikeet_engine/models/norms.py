"""The norms of a decoder: of hidden states, of what is added to them, of queries and keys."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lorikeet_engine.adapter_format import QkNormKind
from lorikeet_engine.kernels.lora.linear import Inputs
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import (
    QkNorm,
    add_delta,
    add_rms_norm,
    add_rms_norm_fp8,
    mean_squares,
)
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.sums import RowExchange


@dataclass(frozen=True, slots=True)
class Product:
    """What is yet to be added to hidden states: y [tokens, width], and to it, what adapters add.

    norm_weight: of y's norm before it is added, [width]; None if it has none. exchange: through
    which y and lora, which are this rank's part, are yet to be summed over ranks.
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
    """What a linear computed, of which each of the ranks, if there are any, has a part.

    Small ones are summed by the norm that reads them, others here.
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
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension; the inside is float32.

    Or y = x, where a family has no norm at this place.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, name: str | None) -> None:
        self.eps = config.norm_eps
        self.multiplier = config.residual_multiplier
        self.weight = read_norm_weight(config, checkpoint, name)

    def add_and_norm(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """Add the product, times the multiplier, to x in place, then normalise each row of x."""
        return add_rms_norm(x, product.y, self.weight, *self._operands(product))

    def inputs(self, x: torch.Tensor, product: Product, *, rounded: bool) -> Inputs:
        """Do what add_and_norm does; rounded: round what it gives to FP8 as well."""
        if self.weight is None or not rounded:
            return self.add_and_norm(x, product)
        return add_rms_norm_fp8(x, product.y, self.weight, *self._operands(product))

    def _operands(self, product: Product) -> tuple[Any, ...]:
        lora, norm_weight, exchange = product.lora, product.norm_weight, product.exchange
        return self.eps, lora, self.multiplier, norm_weight, exchange


def read_norm_weight(
    config: ModelConfig, checkpoint: Checkpoint, name: str | None
) -> torch.Tensor | None:
    """A norm's weight [hidden], None where it has no name. Raises ModelError."""
    cut = Cut.whole(config.shape.hidden)
    return None if name is None else _weight(config, checkpoint, name, cut)


def read_qk_norm(config: ModelConfig, checkpoint: Checkpoint, layer: int) -> QkNorm | None:
    """A layer's norm of this process's queries and keys, None where it has none.

    Raises ModelError.
    """
    if config.qk_norm is QkNormKind.NONE:
        return None
    shape, cuts = config.shape, [Cut.whole(config.shape.head_dim)] * 2
    if config.qk_norm is QkNormKind.WHOLE:
        q, k = (checkpoint.shard.ranges(shape)[n] for n in shape.groups["qkv"][:2])
        widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        cuts = [Cut((widths[0],), q.outputs[0]), Cut((widths[1],), k.outputs[0])]
    query, key = (
        _weight(config, checkpoint, f"model.layers.{layer}.self_attn.{name}_norm", cut)
        for name, cut in zip("qk", cuts, strict=True)
    )
    return QkNorm(query, key, config.norm_eps)


def shared_qk_norm(
    norm: QkNorm, ranks: RankGroup, qkv: torch.Tensor, kv_heads: int, lora: LoraDelta | None
) -> QkNorm:
    """The norm of all heads together for this step, of which each process has some.

    qkv, kv_heads, lora: as rotary_and_store_kv is to get them.
    """
    squares = mean_squares(qkv, kv_heads, ranks.world, lora)
    ranks.sums.all_reduce(squares)
    return replace(norm, mean_squares=squares)


def _weight(config: ModelConfig, checkpoint: Checkpoint, name: str, cut: Cut) -> torch.Tensor:
    if config.norms_plus_one:
        return checkpoint.read_plus_one(f"{name}.weight", cut)
    return checkpoint.read_parts([f"{name}.weight"], [cut])
