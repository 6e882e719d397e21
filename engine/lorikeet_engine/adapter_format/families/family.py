"""What families of base models differ in."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lorikeet_engine.adapter_format.families.linear import Linear


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
