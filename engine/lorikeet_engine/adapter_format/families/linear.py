"""A linear of the base model, by what it reads and writes, and those outside its layers."""

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
    EXPERTS = "num_local_experts"
    VOCABULARY = "vocab_size"
    TOKEN = "token"  # an id, to the base of 256


class Parallel(StrEnum):
    """Which side of a linear is cut where several processes share it."""

    COLUMN = "column"  # its outputs
    ROW = "row"  # its inputs
    WHOLE = "whole"  # neither


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear that every decoder layer has, or what the model has once: head and embeddings.

    module: its path in the layer, or in the model. outputs: several where it stores several
    linears on top of one another. group: neighbouring linears of one group read one input, and are
    one fused product. of_experts: whether it is one for each of the model's experts, each with an
    adapter of its own.
    """

    module: str
    inputs: Width
    outputs: tuple[Width, ...]
    group: str
    parallel: Parallel
    of_experts: bool = False

    @property
    def gathers(self) -> bool:
        """Whether its input is a token's id, so that images hold A by columns: [d_in, rank]."""
        return self.inputs is Width.VOCABULARY

    @property
    def routes(self) -> bool:
        """Whether it chooses experts: it stays in floats, whatever other linears are rounded to."""
        return self.outputs == (Width.EXPERTS,)

    @property
    def name(self) -> str:
        """The last part of the path, which people know the linear by."""
        return self.module.rpartition(".")[2]

    def path(self, layer: int) -> str:
        """The whole name of a layer's linear, as in a checkpoint and in PEFT's files."""
        return f"model.layers.{layer}.{self.module}"


# What comes after the layers. Where embeddings are tied, it reads their matrix; an adapter of it
# changes the logits alone.
HEAD = Linear("lm_head", Width.HIDDEN, (Width.VOCABULARY,), "lm_head", Parallel.COLUMN)
# What comes before the layers, as a linear of tokens as unit vectors: each reads one column of A.
EMBEDDINGS = Linear(
    "model.embed_tokens", Width.VOCABULARY, (Width.HIDDEN,), "embed_tokens", Parallel.WHOLE
)
OUTER_MODULES = (HEAD.name, EMBEDDINGS.name)
# Rows of these two that an adapter has in place of the base model's: as if of a linear that has for
# each of its tokens, the rank, the row as A's and the id's digits as B's.
HEAD_ROWS, EMBEDDING_ROWS = (
    Linear(name, Width.HIDDEN, (Width.TOKEN,), name, Parallel.WHOLE)
    for name in ("lm_head_rows", "embed_tokens_rows")
)
