"""What families of base models differ in."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The RMS norms of a decoder layer, by their names in it; None where there is none.

    Of what attention and the MLP read, and of what they add to the hidden states.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


class QkNormKind(StrEnum):
    """What is normed before queries and keys turn."""

    NONE = "none"
    HEAD = "head"  # each head's query and key
    WHOLE = "whole"  # a token's queries together, and its keys


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys of config.json that size a mixture of experts, which a family's MLPs are.

    counts: of how many experts a layer has; the first that a file has counts. width: of each
    expert's intermediate vector. normalised: whether the weights of a token's experts add up to 1
    whatever norm_topk_prob says. old_linears: whether trainers' targets call the linears w1, w3 and
    w2.
    """

    counts: tuple[str, ...]
    width: str
    normalised: bool = False
    old_linears: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. linears: of each decoder layer, in the table's order.

    switches: the keys of config.json that only some families read, each with what it means where
    the file leaves it out, as in transformers' class of the family; so also for common keys whose
    default is not the usual one. qkv_bias: whether q, k and v have biases, whatever attention_bias
    says. o_bias: the switch that gives o one; None: none does. interleaved_rope: whether neighbours
    turn as a pair, and not x[i] with x[i + half]. experts: None where MLPs are dense.
    norms_plus_one: whether a norm multiplies by 1 + its weight. scaled_embeddings: whether
    embeddings are multiplied by √hidden_size.
    """

    name: str
    linears: tuple[Linear, ...]
    switches: Mapping[str, Any]
    qkv_bias: bool = False
    o_bias: str | None = "attention_bias"
    norms: LayerNorms = LayerNorms()
    qk_norm: QkNormKind = QkNormKind.NONE
    interleaved_rope: bool = False
    experts: ExpertKeys | None = None
    norms_plus_one: bool = False
    scaled_embeddings: bool = False


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
