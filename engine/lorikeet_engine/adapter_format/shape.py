"""The widths of a base model's linear layers: what an adapter's matrices must fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorikeet_engine.errors import ModelError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class BaseShape:
    """One base model's shape. Widths in elements."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "BaseShape":
        """From a Hugging Face config.json. Raises ModelError for other families."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type={family!r}: want one of {', '.join(FAMILIES)}")
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden % heads:
            raise ModelError(
                f"hidden_size={hidden} is no multiple of num_attention_heads={heads}: "
                "config.json must give head_dim"
            )
        return cls(
            family=family,
            layers=_count(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_count(config, "intermediate_size"),
            heads=heads,
            kv_heads=_count(config, "num_key_value_heads", default=heads),
            head_dim=_count(config, "head_dim", default=hidden // heads),
        )

    def dims(self, linear_index: int) -> tuple[int, int]:
        """(d_in, d_out) of the linear with this index in LINEARS."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (self.hidden, query),
            (self.hidden, kv),
            (self.hidden, kv),
            (query, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        )[linear_index]


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key}={value!r} in config.json: want an integer ≥ 1")
    return value
