"""Classes that describe a family of base models: its linears, norms and switches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Width(StrEnum):
    """Width of a linear's input or output.

    The width consists of equal pieces, such as attention heads; tensor parallel ranks divide it
    between pieces. The value of a width is the key of config.json that holds the number of its
    pieces, or a name of its own if another width has that key.
    """

    HIDDEN = "hidden_size"
    QUERIES = "num_attention_heads"
    GATED_QUERIES = "gated queries"  # of each attention head, its query and its output's gate
    KEYS = "num_key_value_heads"  # and values, of the same width
    FULL_QUERIES = "full queries"  # in layers without a window, if their heads differ
    FULL_KEYS = "num_global_key_value_heads"  # and values, in these layers
    DELTA_KEYS = "linear_num_key_heads"  # and queries, of a delta net; B, and C, of Mamba 2
    DELTA_VALUES = "linear_num_value_heads"  # x, and z, of Mamba 2
    DELTA_GATES = "delta gates"  # a number for each value head of a delta net or of Mamba 2
    DELTA_QKVZ = "delta qkvz"  # of each key head, all that its query, key and value heads have
    DELTA_BA = "delta ba"  # of each key head, both numbers of its value heads
    INTERMEDIATE = "intermediate_size"
    WIDE_INTERMEDIATE = "wide intermediate"  # of MLPs in layers that share keys and values
    LAYER_INPUT = "hidden_size_per_layer_input"  # what a layer reads of embeddings of its own
    LAYER_INPUTS = "inputs of all layers"  # such vectors of all layers
    EXPERTS = "num_local_experts"
    SHARED_INTERMEDIATE = "shared_expert_intermediate_size"
    DENSE_INTERMEDIATE = "dense intermediate"  # of MLPs in a model that has mixtures, too
    LATENT = "moe_latent_size"  # what a mixture's experts read and write, if not hidden states
    QUERY_LATENT = "q_lora_rank"  # what queries of latent attention are made of
    KV_LATENT = "kv_lora_rank"  # what keys and values of latent attention are made of
    LATENT_AND_KEY = "kv latent and rotary key"  # all that latent attention keeps of a token
    LATENT_KEYS_VALUES = "keys and values"  # of each head, its key without rotary part, its value
    LATENT_VALUES = "latent values"  # of each head of latent attention
    ONE = "one"
    VOCABULARY = "vocab_size"
    TOKEN = "token"  # the base-256 digits of an id


class LayerKind(StrEnum):
    """Kind of a decoder layer, by what mixes a sequence's tokens.

    Layers of the kinds MLP, EXPERTS and LATENT_EXPERTS mix none; they occur in families whose
    layers consist of one part (Family.alone).

    ATTENTION: attention to all earlier tokens or to a window. WINDOW: attention to a window, in
        families whose layers with a window have other linears; ATTENTION is to all earlier tokens
        then. READING_ATTENTION, READING_WINDOW: such layers that have queries alone, and attend to
        the keys and values of the last layer before them that has its own, of ATTENTION or WINDOW.
        DELTA_NET: gated delta net (arXiv 2412.06464), whose state has the same size for any
        context. MAMBA: Mamba 2 (arXiv 2405.21060), with such a state, too.
    DENSE, SPARSE: attention to all earlier tokens, and after it a dense MLP or a mixture of
        experts, in families that have both.
    MLP: dense MLP. EXPERTS: mixture of experts. LATENT_EXPERTS: mixture of experts that read and
        write vectors narrower than hidden states.
    """

    ATTENTION = "full_attention"
    WINDOW = "sliding_attention"
    READING_ATTENTION = "reading_full_attention"
    READING_WINDOW = "reading_sliding_attention"
    DELTA_NET = "linear_attention"
    MAMBA = "mamba"
    DENSE = "dense"
    SPARSE = "sparse"
    MLP = "mlp"
    EXPERTS = "moe"
    LATENT_EXPERTS = "latent_moe"

    @property
    def has_state(self) -> bool:
        """Whether layers of this kind keep a state for each sequence."""
        return self in (LayerKind.DELTA_NET, LayerKind.MAMBA)

    @property
    def words(self) -> str:
        """Words for a layer of this kind in error messages, such as "a gated delta net"."""
        return {
            LayerKind.ATTENTION: "attention",
            LayerKind.WINDOW: "attention with a window",
            LayerKind.READING_ATTENTION: "attention to another layer's keys and values",
            LayerKind.READING_WINDOW: "attention with a window to another layer's keys and values",
            LayerKind.DELTA_NET: "a gated delta net",
            LayerKind.MAMBA: "a Mamba 2 mixer",
            LayerKind.DENSE: "a dense MLP",
            LayerKind.SPARSE: "a mixture of experts",
            LayerKind.MLP: "an MLP",
            LayerKind.EXPERTS: "a mixture of experts",
            LayerKind.LATENT_EXPERTS: "a mixture of experts with latent projections",
        }[self]

    @property
    def mixes(self) -> bool:
        """Whether layers of this kind mix a sequence's tokens."""
        return self.has_state or self in (
            *(LayerKind.ATTENTION, LayerKind.WINDOW),
            *(LayerKind.READING_ATTENTION, LayerKind.READING_WINDOW),
            *(LayerKind.DENSE, LayerKind.SPARSE),
        )

    @property
    def has_window(self) -> bool:
        """Whether layers of this kind have a window, in families where kinds tell it."""
        return self in (LayerKind.WINDOW, LayerKind.READING_WINDOW)

    @property
    def owner(self) -> "LayerKind":
        """Kind of the layers whose keys and values layers of this kind attend to."""
        owners = {
            LayerKind.READING_ATTENTION: LayerKind.ATTENTION,
            LayerKind.READING_WINDOW: LayerKind.WINDOW,
        }
        return owners.get(self, self)

    @property
    def reader(self) -> "LayerKind":
        """Kind of the layers that attend to the keys and values of layers of this kind."""
        readers = {
            LayerKind.ATTENTION: LayerKind.READING_ATTENTION,
            LayerKind.WINDOW: LayerKind.READING_WINDOW,
        }
        return readers[self]

    @property
    def has_kv(self) -> bool:
        """Whether layers of this kind keep keys and values, or latents, of their own."""
        return self.mixes and not self.has_state and self.owner is self

    @property
    def is_dense(self) -> bool:
        """Whether layers of this kind have a dense MLP although others have mixtures."""
        return self in (LayerKind.DENSE, LayerKind.MLP)


class Parallel(StrEnum):
    """Side of a linear that is divided among tensor parallel ranks."""

    COLUMN = "column"  # its outputs
    ROW = "row"  # its inputs
    WHOLE = "whole"  # neither


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear of decoder layers, or one outside the layers: head or embeddings.

    module: path in the layer; for a linear outside the layers, path in the model.
    inputs: width of the input.
    outputs: widths of the output; several if the linear stacks several matrices.
    group: name of a fused product. Neighbouring linears of one group have the same input, and are
        computed together.
    parallel: side that tensor parallel ranks divide.
    of_experts: whether each expert has such a linear, with an adapter of its own.
    kinds: only layers of these kinds have the linear; empty: all layers.
    """

    module: str
    inputs: Width
    outputs: tuple[Width, ...]
    group: str
    parallel: Parallel
    of_experts: bool = False
    kinds: tuple[LayerKind, ...] = ()

    @property
    def gathers(self) -> bool:
        """Whether the input is a token id, so packed weights hold A by columns: [d_in, rank]."""
        return self.inputs is Width.VOCABULARY

    @property
    def is_never_fp8(self) -> bool:
        """Whether the linear stays in floats beside FP8 linears, as in Qwen's FP8 checkpoints."""
        kinds = Width.EXPERTS, Width.ONE, Width.DELTA_GATES, Width.DELTA_BA
        return self.outputs[0] in kinds

    @property
    def name(self) -> str:
        """Last part of the linear's path, such as q_proj; with the part before for linears of a
        shared expert, such as shared_expert.up_proj, and of experts beside dense MLPs.
        """
        before, _, last = self.module.rpartition(".")
        owner = before.rpartition(".")[2]
        named = owner.startswith("shared_") or (
            self.of_experts and (self.kinds or before == "experts")
        )
        return f"{owner}.{last}" if named else last

    def path(self, layer: int) -> str:
        """Return the linear's full name in a layer, as in a checkpoint and in PEFT's files."""
        return f"model.layers.{layer}.{self.module}"


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of the RMS norms in a decoder layer; None where the layer has no norm.

    attention_input, mlp_input: norms of the hidden states that attention and the MLP read.
    attention_output, mlp_output: norms of the results of attention and the MLP, before these are
        added to the hidden states.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


class QkNormKind(StrEnum):
    """Vectors of queries and keys that RMS norms are applied to before rotary embeddings."""

    NONE = "none"
    HEAD = "head"  # each head's query and key separately
    WHOLE = "whole"  # a token's queries of all heads together, and its keys


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Keys of config.json, and naming, for a family's mixture of experts.

    counts: keys for the number of experts in a layer; if config.json has several, the first of them
        is used.
    width: key for the width of each expert's intermediate vector.
    normalised: whether the weights of a token's experts always add up to 1, whatever norm_topk_prob
        says.
    old_linears: whether trainers' configs call the linears w1, w3 and w2.
    parameters: whether every release of transformers has parameters of all experts, not linears of
        each, so that PEFT's target_modules selects none of them.
    shared: whether every token also passes one more expert, the shared one.
    weighed: whether the shared expert's output is multiplied by the sigmoid of shared_expert_gate's
        output; else it is added as it is.
    shared_width: key for the width of the shared expert's intermediate vector.
    shared_count: key for this width in widths of an expert, as if several experts were shared; it
        replaces shared_width. None: the family has no such key.
    may_lack: whether a model of the family may have no experts, and the shared one alone.
    sigmoid: whether an expert's weight is the sigmoid of its logit, not a softmax over all; experts
        are chosen by this weight plus a trained bias (DeepSeek V3's router).
    per_token: key for the number of experts that compute a token.
    beside: whether a dense MLP and the experts compute side by side, as in Gemma 4: each with norms
        of its own, the router with another norm of the hidden states, and with a trained factor of
        each expert's weight. The dense MLP has the linears of a shared expert.
    clamped: whether experts are gpt-oss's: router and experts have biases, gates and the values
        that they gate are clamped, and checkpoints store the weights of all experts as one tensor
        [experts, d_in, d_out] in which gates and values alternate.
    """

    counts: tuple[str, ...]
    width: str
    normalised: bool = False
    old_linears: bool = False
    parameters: bool = False
    shared: bool = False
    weighed: bool = True
    may_lack: bool = False
    sigmoid: bool = False
    clamped: bool = False
    shared_width: str = Width.SHARED_INTERMEDIATE
    shared_count: str | None = None
    per_token: str = "num_experts_per_tok"
    beside: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentKeys:
    """Keys of config.json for a family's delta nets or Mamba 2 mixers.

    key_heads, value_heads: keys for the numbers of heads.
    key_dim, value_dim: keys for the widths of a head.
    convolution: key for the number of tokens that the convolution reads.
    conv_bias: key that says whether the convolution has a bias; None: it has none.
    expand: key for the width of all value heads together, as a multiple of hidden_size; it replaces
        a value_dim "auto". None: the family has no such key.
    time_limits: key for the smallest and largest time step of Mamba 2; None for delta nets.
    """

    key_heads: str
    key_dim: str
    value_heads: str
    value_dim: str
    convolution: str
    conv_bias: str | None = None
    time_limits: str | None = None
    expand: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Description of a family of base models.

    linears: adaptable linears of each decoder layer, in the order of LoraWeights.table's columns.
    switches: keys of config.json that only some families read, and common keys with an unusual
        default; each with its default, as in transformers' class of the family.
    qkv_bias: whether q, k and v have biases, whatever attention_bias says.
    o_bias: key of config.json that says whether o has a bias; None: o has no bias.
    rope_in_windows: whether, if the model has a window, only layers with it have rotary embeddings.
    interleaved_rope: whether rotary embeddings rotate neighbouring elements, instead of x[i] with
        x[i + half].
    experts: keys for the mixture of experts; None for dense MLPs.
    norms_plus_one: whether norms multiply by 1 + weight.
    scaled_embeddings: whether embeddings are multiplied by √hidden_size.
    rope_parameters: section of rotary embeddings of a config.json that has none; with
        llama_4_scaling_beta if the family's queries grow with their position. It has a section for
        each kind of layer if config.json must have one for each.
    attention_scale: factor of attention scores; None: 1 / √head_dim, or as the switches say.
    value_norm: whether values pass an RMS norm without a weight.
    layer_scalars: whether hidden states are multiplied by a learned number after each layer.
    sinks: whether each head's softmax of attention has a learned logit more, the sink, without a
        value.
    kinds_key: key of config.json that lists the kind of each layer.
    kind_names: kinds of layers by their names in that list; empty: LayerKind's values.
    alone: whether each layer consists of a norm and one part: attention, Mamba 2 or an MLP. Other
        families' layers have an MLP after each of the former.
    embeddings: name of the embeddings' module in the trainers' model.
    recurrent: keys for delta nets or Mamba 2; None: no layer has either.
    fixed: keys of config.json of which one value alone can be served, with this value.
    scales_in_module: whether, in every release of transformers, the embedding module itself
        multiplies the embeddings, and not the model that calls this module.
    outer: adaptable linears outside the decoder layers, beside lm_head and the embeddings.
    mtp: whether checkpoints may have Qwen's head for multi-token prediction, tensors `mtp.`.
    """

    name: str
    linears: tuple[Linear, ...]
    switches: Mapping[str, Any]
    qkv_bias: bool = False
    o_bias: str | None = "attention_bias"
    norms: LayerNorms = LayerNorms()
    qk_norm: QkNormKind = QkNormKind.NONE
    rope_in_windows: bool = False
    interleaved_rope: bool = False
    experts: ExpertKeys | None = None
    norms_plus_one: bool = False
    scaled_embeddings: bool = False
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    scales_in_module: bool = False
    sinks: bool = False
    attention_scale: float | None = None
    value_norm: bool = False
    layer_scalars: bool = False
    kinds_key: str = "layer_types"
    kind_names: Mapping[str, LayerKind] = field(default_factory=dict)
    alone: bool = False
    embeddings: str = "embed_tokens"
    recurrent: RecurrentKeys | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    outer: tuple[Linear, ...] = ()
    mtp: bool = False

    @property
    def is_hybrid(self) -> bool:
        """Whether the family's decoder layers are of several kinds (LayerKind)."""
        return bool(self.kinds)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the family's decoder layers; empty if all layers have the same linears."""
        return tuple(kind for kind in LayerKind if any(kind in each.kinds for each in self.linears))

    @property
    def usually_has_qkv_bias(self) -> bool:
        """Whether q, k and v have biases if config.json does not set `attention_bias`."""
        return self.qkv_bias or bool(self.switches.get("attention_bias"))


# After the layers. If embeddings are tied, it uses their matrix; its adapter affects logits only.
HEAD = Linear("lm_head", Width.HIDDEN, (Width.VOCABULARY,), "lm_head", Parallel.COLUMN)
# Before the layers, as a linear of tokens as unit vectors: each token reads one column of A.
EMBEDDINGS = Linear(
    "model.embed_tokens", Width.VOCABULARY, (Width.HIDDEN,), "embed_tokens", Parallel.WHOLE
)
# Behind the embeddings, in families whose layers read embeddings of their own beside hidden states.
LAYER_INPUTS = Linear(
    "model.per_layer_model_projection",
    Width.HIDDEN,
    (Width.LAYER_INPUTS,),
    "per_layer_model_projection",
    Parallel.WHOLE,
)
OUTER = (HEAD, EMBEDDINGS, LAYER_INPUTS)
OUTER_MODULES = tuple(linear.name for linear in OUTER)
# Replaced rows of these two modules, stored like a linear: its rank is the number of tokens, its A
# the rows, and its B the digits of the ids.
HEAD_ROWS, EMBEDDING_ROWS = (
    Linear(name, Width.HIDDEN, (Width.TOKEN,), name, Parallel.WHOLE)
    for name in ("lm_head_rows", "embed_tokens_rows")
)
# A classification or reward head, which the base model lacks, stored like a linear: its rank is the
# number of labels, its A the weights [labels, hidden], and its B the biases [labels, 1].
SCORE = Linear("score", Width.HIDDEN, (Width.ONE,), "score", Parallel.WHOLE)
