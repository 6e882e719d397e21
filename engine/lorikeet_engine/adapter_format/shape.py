"""A base model's sizes, and the widths of its linears: what an adapter's matrices must fit."""

from collections.abc import Mapping
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
    Linear,
    Width,
)


@dataclass(frozen=True, slots=True)
class BaseShape:
    """One base model's shape. Widths in elements.

    Tables of all that adapters can change have a row for each decoder layer and one more,
    outer_layer, and a column for each of `modules`. The last four of these are outer_layer's alone.
    tied: whether lm_head's weights are those of the embeddings.
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "BaseShape":
        """From a Hugging Face config.json. Raises ModelError, whose `field` is the key at fault."""
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise refusal("model_type", family, f"one of {', '.join(FAMILIES)}")
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
        return cls(
            family=family,
            layers=integer(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=integer(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=integer(config, "vocab_size"),
            tied=flag(config, "tie_word_embeddings"),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of each decoder layer that adapters can change."""
        return FAMILIES[self.family].linears

    @property
    def modules(self) -> tuple[Linear, ...]:
        """A layer's linears, then what the model has once; indices elsewhere count them."""
        return (*self.linears, HEAD, EMBEDDINGS, HEAD_ROWS, EMBEDDING_ROWS)

    @property
    def outer_layer(self) -> int:
        """The number of the row of tables, after the layers', of lm_head and the embeddings."""
        return self.layers

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The indices of a layer's linears that are one fused product, by the group's name."""
        groups = groupby(enumerate(self.linears), key=lambda pair: pair[1].group)
        return {name: tuple(index for index, _ in members) for name, members in groups}

    def dims(self, index: int) -> tuple[int, int]:
        """(d_in, d_out) of the linear with this index in `modules`."""
        linear = self.modules[index]
        return self._elements(linear.inputs), sum(map(self._elements, linear.outputs))

    def index(self, name: str) -> int:
        """The index in `modules` of the one with this name. Raises ValueError if there is none."""
        return [linear.name for linear in self.modules].index(name)

    def pieces(self, width: Width) -> tuple[int, int]:
        """(number of pieces, elements of each) of a width."""
        return {
            Width.HIDDEN: (self.hidden, 1),
            Width.QUERIES: (self.heads, self.head_dim),
            Width.KEYS: (self.kv_heads, self.head_dim),
            Width.INTERMEDIATE: (self.intermediate, 1),
            Width.VOCABULARY: (self.vocabulary, 1),
            Width.TOKEN: (3, 1),
        }[width]

    def _elements(self, width: Width) -> int:
        count, each = self.pieces(width)
        return count * each
