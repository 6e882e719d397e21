"""Sizes of a base model and its linears, which an adapter's matrices must fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

from lorikeet_engine.adapter_format.base_config import flag, integer, refusal
from lorikeet_engine.adapter_format.families import (
    EMBEDDING_ROWS,
    EMBEDDINGS,
    FAMILIES,
    HEAD,
    HEAD_ROWS,
    SCORE,
    VISION_LANGUAGE,
    ExpertKeys,
    Family,
    LayerKind,
    Linear,
    RecurrentKeys,
    Width,
)

_MIXTURES = LayerKind.EXPERTS, LayerKind.LATENT_EXPERTS
# Nemotron's key for the kinds of layers, and its letters.
_PATTERN = "hybrid_override_pattern"
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WINDOWS_AND_FULL = 6
"""Number of layers from one without a window to the next, if layer_types is not given."""


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of the delta nets or Mamba 2 mixers of a base model; widths are numbers of elements.

    Each key head, of width key_dim, serves value_heads / key_heads value heads of width value_dim.
    Each value head has a state [value_dim, key_dim]. What Mamba 2 calls heads are value heads here;
    its groups, each with a B and a C, are key heads, and key_dim is the width of a B.

    convolution: number of tokens that the convolution before the states' update reads.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    convolution: int

    @property
    def group(self) -> int:
        """Number of value heads that share a key head of a delta net; 0 without key heads."""
        return self.value_heads // self.key_heads if self.key_heads else 0

    @property
    def values_of_key(self) -> int:
        """Width of the value heads of each key head."""
        return self.group * self.value_dim

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution: elements of all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1), in elements.

    A token's keys and values of all heads are linear functions of a vector, its latent; beside it,
    all heads share a key with rotary embedding. These two are all that is cached of a token.

    query_rank: vector that queries are made of; 0: they are made of hidden states. kv_rank: latent
        of keys and values.
    plain: part of each head's key and query without rotary embedding. rotary: the other part.
    values: each head's value.
    """

    query_rank: int
    kv_rank: int
    plain: int
    rotary: int
    values: int

    @property
    def cached(self) -> int:
        """Elements that a layer caches of a token: its latent, and the key that heads share."""
        return self.kv_rank + self.rotary


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Heads of attention in some layers of a base model.

    kv_heads: number of key heads, and of value heads. head_dim: elements of a head.
    """

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class BaseShape:
    """Sizes of a base model; widths are numbers of elements.

    Tables of adapted modules have one row per decoder layer, and a last row, outer_layer, for
    modules outside the layers. They have one column for each of `modules`. The columns of modules
    outside the layers are used in the row outer_layer only.

    tied: whether lm_head has the embeddings' weights.
    experts: number of experts in each layer, each of width `intermediate`; 0 for dense MLPs.
    shared_intermediate: width of the expert that all tokens share; 0: there is none.
    kinds: kind of each layer; empty: all layers have attention.
    recurrent: sizes of the delta nets or of Mamba 2; None if no layer has states.
    full: heads of layers without a window (LayerKind.ATTENTION), if heads of layers with a window
        are others; None: all layers have the same.
    dense_intermediate: width of dense MLPs in a model that has mixtures of experts, too.
    latent: width of the vectors that experts read and write; 0: hidden states.
    latents: sizes of latent attention, whose cached vectors are one head of keys; None: heads have
        keys and values of their own. Then head_dim is the width of a query.
    wide_intermediate: width of MLPs in layers that attend to other layers' keys and values.
    layer_input: width of the vector that each layer reads of embeddings of its own; 0: there are
        none.
    biased: names of a layer's fused products, keys of `groups`, whose linears have biases.
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
    shared_intermediate: int = 0
    kinds: tuple[LayerKind, ...] = ()
    recurrent: RecurrentShape | None = None
    full: AttentionHeads | None = None
    dense_intermediate: int = 0
    latent: int = 0
    latents: LatentShape | None = None
    wide_intermediate: int = 0
    layer_input: int = 0
    biased: tuple[str, ...] = ()

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
        latents = _latents(config, FAMILIES[family], heads)
        if latents is not None:
            config |= {"head_dim": latents.plain + latents.rotary, "num_key_value_heads": 1}
        if config.get("head_dim") is None and hidden % heads:
            raise refusal("hidden_size", hidden, f"a multiple of {heads} heads, or head_dim")
        kv_heads = integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise refusal("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        head_dim = integer(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise refusal("head_dim", head_dim, "an even number")
        keys = FAMILIES[family].experts
        kinds = _kinds(config, FAMILIES[family])
        of_state = FAMILIES[family].recurrent
        routed = not FAMILIES[family].alone or not {*_MIXTURES}.isdisjoint(kinds)
        if keys and keys.may_lack and config[keys.counts[0]] == 0:
            routed = False
        if config.get("per_layer_config") and "per_layer_config" not in FAMILIES[family].switches:
            want = "none: all layers have the same sizes"
            raise refusal("per_layer_config", config["per_layer_config"], want)
        return cls(
            family=family,
            layers=len(kinds) or integer(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=integer(config, keys.width if keys else "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=integer(config, "vocab_size"),
            tied=flag(config, "tie_word_embeddings"),
            experts=_experts(config, keys.counts) if keys and routed else 0,
            shared_intermediate=_shared_width(config, keys) if keys and keys.shared else 0,
            kinds=kinds,
            recurrent=_recurrent(config, of_state)
            if of_state and any(kind.has_state for kind in kinds)
            else None,
            full=_full_heads(config, kinds, heads, kv_heads) if LayerKind.WINDOW in kinds else None,
            dense_intermediate=integer(config, "intermediate_size")
            if any(kind.is_dense for kind in kinds)
            else 0,
            latent=integer(config, Width.LATENT) if LayerKind.LATENT_EXPERTS in kinds else 0,
            latents=latents,
            wide_intermediate=_wide(config) if FAMILIES[family].outer else 0,
            layer_input=integer(config, Width.LAYER_INPUT) if FAMILIES[family].outer else 0,
            biased=_biased(config, FAMILIES[family]),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Linears of decoder layers that adapters can change; `has` tells whether a layer has
        one.
        """
        return FAMILIES[self.family].linears

    @cached_property
    def modules(self) -> tuple[Linear, ...]:
        """Linears of a layer, then modules outside the layers: the columns of adapters' tables."""
        outer = FAMILIES[self.family].outer
        return (*self.linears, *outer, HEAD, EMBEDDINGS, HEAD_ROWS, EMBEDDING_ROWS, SCORE)

    @property
    def outer_layer(self) -> int:
        """Row of tables for lm_head and the embeddings, after the rows of the decoder layers."""
        return self.layers

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of the decoder layer with this index."""
        return self.kinds[layer] if self.kinds else LayerKind.ATTENTION

    @property
    def has_mamba(self) -> bool:
        """Whether some layers are Mamba 2 mixers."""
        return LayerKind.MAMBA in self.kinds

    def is_full(self, layer: int) -> bool:
        """Whether a layer has the heads in the field `full`: those of layers without a window."""
        return self.full is not None and self.kind(layer).owner is LayerKind.ATTENTION

    def kv_owner(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, or one before it."""
        own = self.kind(layer).owner
        if own is self.kind(layer):
            return layer
        return max(n for n in range(layer) if self.kind(n) is own)

    @property
    def widest_head(self) -> int:
        """Elements of a head, as attention reads it, in the layers with the widest heads."""
        full, latents = self.full, self.latents
        of_full = 0 if full is None else full.head_dim
        return max(self.head_dim, of_full, 0 if latents is None else latents.cached)

    def heads_of(self, layer: int) -> AttentionHeads:
        """Return the heads of a layer with attention; with latent attention, one: the cached."""
        if self.full is not None and self.is_full(layer):
            return self.full
        if self.latents is not None:
            return AttentionHeads(1, self.latents.cached)
        return AttentionHeads(self.kv_heads, self.head_dim)

    def has(self, layer: int, linear: int) -> bool:
        """Whether the decoder layer with this index has the linear with this index."""
        kinds = self.linears[linear].kinds
        return not kinds or self.kind(layer) in kinds

    def in_layer(self, layer: int, linear: int) -> int:
        """Return the index of the linear in this layer that has the same name as `linear`.

        Linears of layers of several kinds may have the same name, and other widths. Returns
        `linear` if the layer has none of this name.
        """
        return next((n for n in self._namesakes[linear] if self.has(layer, n)), linear)

    @cached_property
    def _namesakes(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the linears that have the same name, for each linear."""
        names = [linear.module for linear in self.linears]
        return tuple(tuple(n for n, other in enumerate(names) if other == name) for name in names)

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Linears that are computed as one product: by the product's name, indices in `modules`."""
        groups = groupby(enumerate(self.linears), key=lambda pair: pair[1].group)
        return {name: tuple(index for index, _ in members) for name, members in groups}

    def members(self, layer: int, group: str) -> tuple[int, ...]:
        """Return the indices in `modules` of linears that a layer computes as one product.

        group: name of one of `groups`; in the row outer_layer, of a module outside the layers.
        """
        if layer == self.outer_layer:
            return (self.index(group),)
        return tuple(n for n in self.groups[group] if self.has(layer, n))

    def dims(self, index: int) -> tuple[int, int]:
        """Return (d_in, d_out) of the module with this index."""
        return self._dims[index]

    @cached_property
    def _dims(self) -> tuple[tuple[int, int], ...]:
        widths = [(each.inputs, each.outputs) for each in self.modules]
        return tuple((self._elements(d_in), sum(map(self._elements, out))) for d_in, out in widths)

    def matrices(self, index: int) -> int:
        """Return how many matrices the module with this index has: one, or one per expert."""
        return self.experts if self.modules[index].of_experts else 1

    def index(self, name: str) -> int:
        """Return the index of the module with this name in `modules`.

        Raises ValueError for an unknown name.
        """
        return [linear.name for linear in self.modules].index(name)

    def pieces(self, width: Width) -> tuple[int, int]:
        """Return the number of pieces that a width can be divided into, and the elements of a
        piece.
        """
        delta = self.recurrent or RecurrentShape(0, 0, 0, 0, 0)
        full = self.full or AttentionHeads(0, 0)
        latents = self.latents or LatentShape(0, 0, 0, 0, 0)
        return {
            Width.HIDDEN: (self.hidden, 1),
            Width.QUERIES: (self.heads, self.head_dim),
            Width.GATED_QUERIES: (self.heads, 2 * self.head_dim),
            Width.KEYS: (self.kv_heads, self.head_dim),
            Width.FULL_QUERIES: (self.heads, full.head_dim),
            Width.FULL_KEYS: (full.kv_heads, full.head_dim),
            Width.DELTA_KEYS: (delta.key_heads, delta.key_dim),
            Width.DELTA_VALUES: (delta.value_heads, delta.value_dim),
            Width.DELTA_GATES: (delta.value_heads, 1),
            Width.DELTA_QKVZ: (delta.key_heads, 2 * (delta.key_dim + delta.values_of_key)),
            Width.DELTA_BA: (delta.key_heads, 2 * delta.group),
            Width.INTERMEDIATE: (self.intermediate, 1),
            Width.WIDE_INTERMEDIATE: (self.wide_intermediate, 1),
            Width.LAYER_INPUT: (self.layer_input, 1),
            Width.LAYER_INPUTS: (self.layers * self.layer_input, 1),
            Width.EXPERTS: (self.experts, 1),
            Width.SHARED_INTERMEDIATE: (self.shared_intermediate, 1),
            Width.DENSE_INTERMEDIATE: (self.dense_intermediate, 1),
            Width.LATENT: (self.latent or self.hidden, 1),
            Width.QUERY_LATENT: (latents.query_rank, 1),
            Width.KV_LATENT: (latents.kv_rank, 1),
            Width.LATENT_AND_KEY: (latents.cached, 1),
            Width.LATENT_KEYS_VALUES: (self.heads, latents.plain + latents.values),
            Width.LATENT_VALUES: (self.heads, latents.values),
            Width.ONE: (1, 1),
            Width.VOCABULARY: (self.vocabulary, 1),
            Width.TOKEN: (3, 1),
        }[width]

    def has_bias(self, linear: int) -> bool:
        """Whether the linear with this index has a bias in the base model."""
        return self.modules[linear].group in self.biased

    def key(self, width: Width) -> str:
        """Return the key of config.json that holds the number of a width's pieces."""
        keys, of_state = FAMILIES[self.family].experts, FAMILIES[self.family].recurrent
        if keys and width in (Width.INTERMEDIATE, Width.SHARED_INTERMEDIATE):
            is_own = width is Width.INTERMEDIATE or keys.shared_count is not None
            return keys.width if is_own else keys.shared_width
        if of_state and width in (Width.DELTA_VALUES, Width.DELTA_GATES):
            return of_state.value_heads
        if of_state and width in (Width.DELTA_KEYS, Width.DELTA_QKVZ, Width.DELTA_BA):
            return of_state.key_heads
        shared = {
            Width.DENSE_INTERMEDIATE: Width.INTERMEDIATE,
            Width.WIDE_INTERMEDIATE: Width.INTERMEDIATE,
            Width.GATED_QUERIES: Width.QUERIES,
            Width.FULL_QUERIES: Width.QUERIES,
            Width.LATENT_KEYS_VALUES: Width.QUERIES,
            Width.LATENT_VALUES: Width.QUERIES,
        }
        return shared.get(width, width)

    def parts(self, width: Width) -> tuple[range, ...]:
        """Return the parts of each piece of a width, if checkpoints and adapters store the parts in
        another order than products have.

        Checkpoints and adapters store all parts of the first piece, then all parts of the next
        piece. Products have the first part of all pieces, then the second part of all pieces. Each
        part is a range of a piece's elements; parts are in the order of products. Returns () for a
        width whose pieces are not divided into parts.
        """
        head, delta = self.head_dim, self.recurrent or RecurrentShape(1, 0, 0, 0, 0)
        key, values, group = delta.key_dim, delta.values_of_key, delta.group
        sizes = {Width.DELTA_QKVZ: (key, key, values, values), Width.DELTA_BA: (group, group)}
        if width is Width.GATED_QUERIES:  # gates first: queries are then beside keys and values
            return range(head, 2 * head), range(head)
        ends = [*accumulate(sizes.get(width, ()), initial=0)]
        return tuple(map(range, ends[:-1], ends[1:]))

    def _elements(self, width: Width) -> int:
        count, each = self.pieces(width)
        return count * each


def _kinds(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """Return the kind of each layer; empty for a family whose layers all have attention.

    config: the base model's config, with defaults of the family's switches for missing keys.
    """
    if not family.kinds:
        return ()
    key, kinds = family.kinds_key, config[family.kinds_key]
    if kinds is None and config.get(_PATTERN) is not None:
        key, kinds = _PATTERN, config[_PATTERN]
        if not isinstance(kinds, str) or not {*kinds} <= {*_LETTERS}:
            raise refusal(key, kinds, f"a text of {', '.join(_LETTERS)}")
        kinds = [_LETTERS[letter] for letter in kinds]
    layers = integer(config, "num_hidden_layers", len(kinds or ()))
    if LayerKind.DENSE in family.kinds:
        kinds = _dense_first(config, kinds, layers)
    if kinds is None and LayerKind.WINDOW in family.kinds:
        window, full = LayerKind.WINDOW, LayerKind.ATTENTION
        kinds = [window if layer % _WINDOWS_AND_FULL else full for layer in range(1, layers)]
        kinds.append(full)
    if kinds is None and "full_attention_interval" in family.switches:
        every = integer(config, "full_attention_interval")
        full, delta = LayerKind.ATTENTION, LayerKind.DELTA_NET
        kinds = [delta if (layer + 1) % every else full for layer in range(layers)]
    names = family.kind_names or {kind.value: kind for kind in family.kinds}
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {*names}:
        raise refusal(key, kinds, f"a list of num_hidden_layers ({layers}) of {', '.join(names)}")
    found = [names[kind] for kind in kinds]
    if LayerKind.WINDOW in family.kinds and found[-1] is not LayerKind.ATTENTION:
        raise refusal(key, kinds, f"{LayerKind.ATTENTION} for the last layer")
    if LayerKind.ATTENTION in family.kinds and LayerKind.ATTENTION not in found:
        raise refusal(key, kinds, f"{LayerKind.ATTENTION} for at least one layer")
    if LayerKind.READING_WINDOW in family.kinds:
        return _with_readers(config, found)
    if config.get(Width.LATENT) is None:
        return tuple(found)
    latent = {LayerKind.EXPERTS: LayerKind.LATENT_EXPERTS}
    return tuple(latent.get(kind, kind) for kind in found)


def _with_readers(config: Mapping[str, Any], kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers where the last num_kv_shared_layers read other layers' KV pages.

    config: the base model's config, with defaults of the family's switches for missing keys.
    kinds: kind of each layer if all had keys and values.
    """
    field, layers = "num_kv_shared_layers", len(kinds)
    readers = config[field] or 0
    if type(readers) is not int or not 0 <= readers < layers:
        raise refusal(field, readers, f"a number from 0 to {layers - 1}")
    owners = kinds[: layers - readers]
    if lacking := {*kinds} - {*owners}:
        want = f"fewer: no layer with keys and values is {min(lacking).words}"
        raise refusal(field, readers, want)
    return (*owners, *(kind.reader for kind in kinds[layers - readers :]))


def _wide(config: Mapping[str, Any]) -> int:
    """Return the width of MLPs in layers without keys and values of their own."""
    width = integer(config, "intermediate_size")
    return 2 * width if flag(config, "use_double_wide_mlp") else width


def _dense_first(config: Mapping[str, Any], kinds: object, layers: int) -> object:
    """Return the kinds of layers of which the first have dense MLPs, and all others mixtures.

    config: the base model's config, with defaults of the family's switches for missing keys.
    kinds: kinds by config.json's list; None: it has none.
    """
    field = "first_k_dense_replace"
    dense = 1 if config[field] is None else config[field]
    if type(dense) is not int or not 0 <= dense < layers:
        raise refusal(field, dense, f"a number from 0 to {layers - 1}")
    by_count = [*["dense"] * dense, *["sparse"] * (layers - dense)]
    if kinds is not None and config[field] is not None and kinds != by_count:
        raise refusal(field, dense, "as many as the first dense layers of mlp_layer_types, or none")
    return by_count if kinds is None else kinds


def _latents(config: Mapping[str, Any], family: Family, heads: int) -> LatentShape | None:
    """Return the sizes of a base model's latent attention; None if it has none.

    config: the base model's config, with defaults of the family's switches for missing keys.
    heads: number of query heads.
    """
    if Width.KV_LATENT not in family.switches:
        return None
    kv_heads = integer(config, "num_key_value_heads", heads)
    if kv_heads != heads:
        raise refusal("num_key_value_heads", kv_heads, f"num_attention_heads ({heads})")
    is_whole = all(Width.QUERY_LATENT not in linear.outputs for linear in family.linears)
    if is_whole and config[Width.QUERY_LATENT] is not None:
        want = f"null: {family.name} has no latents of queries"
        raise refusal(Width.QUERY_LATENT, config[Width.QUERY_LATENT], want)
    rotary = integer(config, "qk_rope_head_dim")
    if rotary % 2:
        raise refusal("qk_rope_head_dim", rotary, "an even number")
    return LatentShape(
        query_rank=0 if is_whole else integer(config, Width.QUERY_LATENT),
        kv_rank=integer(config, Width.KV_LATENT),
        plain=integer(config, "qk_nope_head_dim"),
        rotary=rotary,
        values=integer(config, "v_head_dim"),
    )


def _shared_width(config: Mapping[str, Any], keys: ExpertKeys) -> int:
    if keys.shared_count is None:
        return integer(config, keys.shared_width)
    return integer(config, keys.shared_count) * integer(config, keys.width)


def _full_heads(
    config: Mapping[str, Any], kinds: Sequence[LayerKind], heads: int, kv_heads: int
) -> AttentionHeads:
    """Return the heads of layers without a window.

    config.json has them under keys of their own, or, from transformers 5.24 on, for each layer.

    config: the base model's config, with defaults of the family's switches for missing keys.
    kinds: kind of each layer.
    heads, kv_heads: numbers of query heads, and of key heads in layers with a window.
    """
    given = config["per_layer_config"]
    if given is None:
        own = config["num_global_key_value_heads"] if config["attention_k_eq_v"] else None
        found: Any = {"head_dim": config["global_head_dim"], "num_key_value_heads": own or kv_heads}
    else:
        full = [str(n) for n, kind in enumerate(kinds) if kind.owner is LayerKind.ATTENTION]
        each = given if isinstance(given, Mapping) else {}
        sizes = {str(layer).lstrip("0") or "0": sizes for layer, sizes in each.items()}  # of "05"
        found = sizes.get(full[0])
        if found is None or sizes != dict.fromkeys(full, found) or not isinstance(found, Mapping):
            want = f"the same sizes for each of the layers {', '.join(full)}, and none for others"
            raise refusal("per_layer_config", given, want)
        if unknown := {*found} - {"head_dim", "num_key_value_heads"}:
            want = "head_dim and num_key_value_heads alone"
            raise refusal("per_layer_config", sorted(unknown), want)
    head_dim = integer(found, "head_dim", integer(config, "head_dim"))
    kv_heads = integer(found, "num_key_value_heads", kv_heads)
    if head_dim % 2:
        raise refusal("global_head_dim", head_dim, "an even number")
    if heads % kv_heads:
        raise refusal("num_global_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    return AttentionHeads(kv_heads, head_dim)


def _recurrent(config: Mapping[str, Any], keys: RecurrentKeys) -> RecurrentShape:
    """Return the sizes of a base model's delta nets or Mamba 2 mixers.

    config: the base model's config, with defaults of the family's switches for missing keys.
    """
    key_heads, value_heads = integer(config, keys.key_heads), integer(config, keys.value_heads)
    if value_heads % key_heads:
        want = f"a multiple of {keys.key_heads} ({key_heads})"
        raise refusal(keys.value_heads, value_heads, want)
    value_dim = config[keys.value_dim]
    if keys.expand is not None:
        width = integer(config, keys.expand) * integer(config, "hidden_size")
        value_dim = width // value_heads if value_dim == "auto" else value_dim
        if value_dim * value_heads != width:
            want = f"{width} elements, as {keys.expand} says, divided by {keys.value_heads}"
            raise refusal(keys.value_dim, value_dim, f"{want} ({value_heads})")
    return RecurrentShape(
        key_heads=key_heads,
        key_dim=integer(config, keys.key_dim),
        value_heads=value_heads,
        value_dim=integer({keys.value_dim: value_dim}, keys.value_dim),
        convolution=integer(config, keys.convolution),
    )


def _biased(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Return the names of fused products (linears computed as one) whose linears have biases.

    config: config.json, with the family's defaults.
    """

    def is_set(key: str | None) -> bool:
        return key is not None and key in family.switches and flag(config, key)

    groups = list[str]()
    if family.qkv_bias or is_set("attention_bias"):
        groups += ["qkv", "full_qkv"]
    if is_set(family.o_bias):
        groups += ["o", "full_o"]
    if is_set("mlp_bias"):
        groups += ["gate_up", "up", "down"]
    if family.experts is not None and family.experts.clamped:
        groups.append("router")
    found = {linear.group for linear in family.linears}
    return tuple(group for group in groups if group in found)


def _experts(config: Mapping[str, Any], counts: Sequence[str]) -> int:
    """Return the number of experts in a layer.

    config: the base model's config.
    counts: keys that may hold the number; the first one in the config is read.
    """
    field = next((key for key in counts if config.get(key) is not None), counts[0])
    return integer(config, field)
