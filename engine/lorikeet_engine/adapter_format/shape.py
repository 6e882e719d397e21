"""Sizes of a base model and its linears, which an adapter's matrices must fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lorikeet_engine.adapter_format.base_config import flag, integer, refusal
from lorikeet_engine.adapter_format.families import (
    EMBEDDING_ROWS,
    EMBEDDINGS,
    FAMILIES,
    HEAD,
    HEAD_ROWS,
    VISION_LANGUAGE,
    Linear,
    Width,
)


@dataclass(frozen=True, slots=True)
class BaseShape:
    """Shape of a base model; widths in elements.

    Tables of adapted modules have one row per decoder layer, and a last row, outer_layer, for
    modules outside the layers. They have one column for each of `modules`. The last four columns
    are used in the row outer_layer only.

    tied: lm_head has the embeddings' weights.
    experts: number of experts in each layer, each of width `intermediate`; 0 for dense MLPs.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "BaseShape":
        """Return the shape of the base model whose config read_config has returned.

        Raises ModelError, whose `field` is the key at fault.
        """
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            others = ", ".join(VISION_LANGUAGE)
            want = f"one of {', '.join(FAMILIES)}; or {others}, whose text part is one of these"
            raise refusal("model_type", family, want)
        config = {**FAMILIES[family].switches, **config}
        hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % heads:
            raise refusal("hidden_size", hidden, f"a multiple of {heads} heads, or head_dim")
        kv_heads = integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise refusal("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        head_dim = integer(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise refusal("head_dim", head_dim, "an even number")
        keys = FAMILIES[family].experts
        return cls(
            family=family,
            layers=integer(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=integer(config, keys.width if keys else "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=integer(config, "vocab_size"),
            tied=flag(config, "tie_word_embeddings"),
            experts=_experts(config, keys.counts) if keys else 0,
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Linears of each decoder layer that adapters can change."""
        return FAMILIES[self.family].linears

    @property
    def modules(self) -> tuple[Linear, ...]:
        """Linears of a layer, then modules outside the layers; module indices refer to these."""
        return (*self.linears, HEAD, EMBEDDINGS, HEAD_ROWS, EMBEDDING_ROWS)

    @property
    def outer_layer(self) -> int:
        """Row of tables for lm_head and the embeddings, after the rows of the decoder layers."""
        return self.layers

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Fused products of a decoder layer: by name, the indices in `modules` of their linears."""
        groups = groupby(enumerate(self.linears), key=lambda pair: pair[1].group)
        return {name: tuple(index for index, _ in members) for name, members in groups}

    def dims(self, index: int) -> tuple[int, int]:
        """Return (d_in, d_out) of the module with this index."""
        linear = self.modules[index]
        return self._elements(linear.inputs), sum(map(self._elements, linear.outputs))

    def matrices(self, index: int) -> int:
        """Return how many matrices the module with this index has: one, or one per expert."""
        return self.experts if self.modules[index].of_experts else 1

    def index(self, name: str) -> int:
        """Return the index of the module with this name in `modules`.

        Raises ValueError for an unknown name.
        """
        return [linear.name for linear in self.modules].index(name)

    def pieces(self, width: Width) -> tuple[int, int]:
        """Return into how many pieces a width can be divided, and the elements of each piece."""
        return {
            Width.HIDDEN: (self.hidden, 1),
            Width.QUERIES: (self.heads, self.head_dim),
            Width.KEYS: (self.kv_heads, self.head_dim),
            Width.INTERMEDIATE: (self.intermediate, 1),
            Width.EXPERTS: (self.experts, 1),
            Width.VOCABULARY: (self.vocabulary, 1),
            Width.TOKEN: (3, 1),
        }[width]

    def key(self, width: Width) -> str:
        """Return the key of config.json that holds the number of a width's pieces."""
        keys = FAMILIES[self.family].experts
        return keys.width if keys and width is Width.INTERMEDIATE else width

    def _elements(self, width: Width) -> int:
        count, each = self.pieces(width)
        return count * each


def _experts(config: Mapping[str, Any], counts: Sequence[str]) -> int:
    """Return the number of experts in a layer.

    config: the base model's config.
    counts: keys that may hold the number; the first one in the config is read.
    """
    field = next((key for key in counts if config.get(key) is not None), counts[0])
    return integer(config, field)
