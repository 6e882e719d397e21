"""The families of base models, and which linears each has for adapters to change.

A family with other linears, one whose checkpoints store q, k and v as one, say, needs only another
tuple of them here: names, widths, images, the table and the model's products all follow from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Width(StrEnum):
    """What a linear reads or writes, by the key of config.json that counts its pieces.

    Processes that share a linear cut it between pieces.
    """

    HIDDEN = "hidden_size"
    QUERIES = "num_attention_heads"
    KEYS = "num_key_value_heads"  # and as wide: values
    INTERMEDIATE = "intermediate_size"
    VOCABULARY = "vocab_size"


class Parallel(StrEnum):
    """Which side of a linear is cut where several processes share it."""

    COLUMN = "column"  # its outputs
    ROW = "row"  # its inputs


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear that every decoder layer has, HEAD or EMBEDDINGS.

    module: its path in the layer, or in the model. outputs: several where it stores several
    linears on top of one another. group: neighbouring linears of one group read one input, and are
    one fused product. experts: how many matrices of these widths it holds, each with an adapter of
    its own.
    """

    module: str
    inputs: Width
    outputs: tuple[Width, ...]
    group: str
    parallel: Parallel
    experts: int = 1

    @property
    def gathers(self) -> bool:
        """Whether its input is a token's id, so that images hold A by columns: [d_in, rank]."""
        return self.inputs is Width.VOCABULARY

    @property
    def name(self) -> str:
        """The last part of the path, which people know the linear by."""
        return self.module.rpartition(".")[2]

    def path(self, layer: int) -> str:
        """The whole name of a layer's linear, as in a checkpoint and in PEFT's files."""
        return f"model.layers.{layer}.{self.module}"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. linears: of each decoder layer, in the table's order."""

    name: str
    linears: tuple[Linear, ...]


_SEPARATE = (
    Linear("self_attn.q_proj", Width.HIDDEN, (Width.QUERIES,), "qkv", Parallel.COLUMN),
    Linear("self_attn.k_proj", Width.HIDDEN, (Width.KEYS,), "qkv", Parallel.COLUMN),
    Linear("self_attn.v_proj", Width.HIDDEN, (Width.KEYS,), "qkv", Parallel.COLUMN),
    Linear("self_attn.o_proj", Width.QUERIES, (Width.HIDDEN,), "o", Parallel.ROW),
    Linear("mlp.gate_proj", Width.HIDDEN, (Width.INTERMEDIATE,), "gate_up", Parallel.COLUMN),
    Linear("mlp.up_proj", Width.HIDDEN, (Width.INTERMEDIATE,), "gate_up", Parallel.COLUMN),
    Linear("mlp.down_proj", Width.INTERMEDIATE, (Width.HIDDEN,), "down", Parallel.ROW),
)

# By config.json's model_type.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", _SEPARATE),
    "mistral": Family("Mistral", _SEPARATE),
    "qwen2": Family("Qwen 2.5", _SEPARATE),
    "qwen3": Family("Qwen 3", _SEPARATE),
}

# What comes after the layers. Where embeddings are tied, it reads their matrix; an adapter of it
# changes the logits alone.
HEAD = Linear("lm_head", Width.HIDDEN, (Width.VOCABULARY,), "lm_head", Parallel.COLUMN)
# What comes before the layers, as a linear of tokens as unit vectors: each reads one column of A.
EMBEDDINGS = Linear(
    "model.embed_tokens", Width.VOCABULARY, (Width.HIDDEN,), "embed_tokens", Parallel.ROW
)
OUTER_MODULES = (HEAD.name, EMBEDDINGS.name)
