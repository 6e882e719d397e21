"""Validates a blob against a base model, and locates its matrices."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from lorikeet_engine.adapter import Embedder, TouchedModules
from lorikeet_engine.adapter_format.base_copies import BaseCopy, parse_copies
from lorikeet_engine.adapter_format.embedding_config import parse_embedder
from lorikeet_engine.adapter_format.experts.names import experts_kind, is_of_experts
from lorikeet_engine.adapter_format.families import (
    EMBEDDINGS,
    FAMILIES,
    HEAD,
    OUTER,
    OUTER_MODULES,
    SCORE,
)
from lorikeet_engine.adapter_format.header import TensorSpan, read_header
from lorikeet_engine.adapter_format.lora_config import LoraConfig
from lorikeet_engine.adapter_format.score_head import HeadRows, head_part, parse_head, read_head
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.tensor_names import (
    BIAS,
    LORA_BIAS,
    locate_module,
    parts_of,
    split_tensor_name,
    take_tensors,
    tensor_name,
    token_rows_module,
    whole_module,
    with_shared_a,
)
from lorikeet_engine.adapter_format.token_rows import (
    MODULES_KEY,
    TOKENS_KEY,
    TokenRows,
    added_vocabulary,
    parse_rows,
    read_token_rows,
)
from lorikeet_engine.adapter_format.vectors import (
    LinearVectors,
    check_has_place,
    check_widths,
    take_vectors,
)
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge

METADATA_KEY = "lorikeet"
Span = TypeVar("Span", bound=TensorSpan)
# Every packed matrix starts at a multiple of this many elements: 32 bytes in 16-bit dtypes.
ALIGNMENT = 16
# First release of transformers whose Gemma 4 has no keys in layers that read other layers' keys.
_WITHOUT_UNUSED = "5.6"
_INVOCATION = "alora_invocation_tokens"


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits that an operator sets for adapters.

    max_rank: maximum LoRA rank of any linear.
    max_bytes: maximum size of an adapter's blob, the one file that holds all of it.
    max_added_tokens: maximum number of tokens behind the base model's vocabulary.
    """

    max_rank: int
    max_bytes: int
    max_added_tokens: int = 0

    def lowered_to(self, max_rank: int | None, max_bytes: int | None) -> "AdapterLimits":
        """Return the stricter of these limits and a tenant's limits.

        max_rank, max_bytes: limits of the tenant; None where the tenant has no limit of its own.
        """
        return AdapterLimits(
            self.max_rank if max_rank is None else min(self.max_rank, max_rank),
            self.max_bytes if max_bytes is None else min(self.max_bytes, max_bytes),
            self.max_added_tokens,
        )


@dataclass(frozen=True, slots=True)
class LinearLora:
    """One linear that an adapter changes: A is [rank, d_in], and B [d_out, rank].

    Matrices of experts have one dimension more, the first: the number of experts, or 1 if all
    experts share the matrix.

    layer: index of the decoder layer; BaseShape.outer_layer for modules outside the layers.
    linear: index of the linear in BaseShape.modules.
    name: the linear's name, for error messages.
    rank: LoRA rank.
    scaling: factor of B @ A.
    a, b: places of the matrices in the adapter's file.
    gathers: whether the linear's input is a token id, as for embeddings.
    experts: number of experts; 1 for other linears.
    half: for gate_proj and up_proj of experts, if rows of both alternate in the B that was trained:
        half of that B that `b` is, 0 for gate_proj and 1 for up_proj. None: b is the linear's own.
    """

    layer: int
    linear: int
    name: str
    rank: int
    scaling: float
    a: TensorSpan
    b: TensorSpan
    gathers: bool
    experts: int = 1
    half: int | None = None

    def matrix(self, side: str) -> str:
        """Return the name of one of the linear's two matrices, for error messages.

        side: A or B.
        """
        return f"{self.name}.lora_{side}"

    def matrices(self, side: int) -> int:
        """Return the number of A or of B in the file: one for each expert, or 1 if they share it.

        side: 0 for A, 1 for B.
        """
        return math.prod((self.a, self.b)[side].shape[:-2])


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Content of an adapter's file, its blob, that was validated against a base model.

    base_model: name of the base model that the adapter was trained on, as its config has it.
    linears: adapted linears, sorted by layer, then by index in the shape's modules.
    max_rank: largest LoRA rank of any adapted linear.
    size_bytes: size of the blob.
    token_rows: rows of trained tokens and of modules that were trained whole. If the base model's
        head is tied, trained tokens of the embeddings are listed for the head as well.
    vectors: DoRA's magnitudes and biases, sorted like `linears`. A linear can have biases alone.
    invocation_tokens: of an activated LoRA, the tokens from which on it changes a prompt; else ().
    head: classification or reward head; None: the adapter generates.
    embedder: the adapter's own way of embedding texts; None: the base model's.
    vocabulary: number of tokens, if they are more than the base model's; else 0.
    """

    base_model: str
    linears: tuple[LinearLora, ...]
    max_rank: int
    size_bytes: int
    token_rows: tuple[TokenRows, ...] = ()
    vectors: tuple[LinearVectors, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    head: HeadRows | None = None
    embedder: Embedder | None = None
    vocabulary: int = 0

    @property
    def shared_a(self) -> frozenset[tuple[int, int]]:
        """Keys (layer, linear) of linears that have the same A as the preceding linear.

        up_proj of experts can share the A of gate_proj.
        """
        return frozenset(
            (part.layer, part.linear)
            for before, part in pairwise(self.linears)
            if part.a == before.a
        )

    @property
    def shared_outer(self) -> frozenset[tuple[int, int, int]]:
        """Keys (layer, linear, side) of matrices that all experts of a linear share.

        side is 0 for A, and 1 for B.
        """
        return frozenset(
            (part.layer, part.linear, side)
            for part in self.linears
            for side in (0, 1)
            if part.matrices(side) < part.experts
        )

    @property
    def touches(self) -> TouchedModules:
        """Modules of the base model that the adapter changes."""
        names = {part.linear: _without_layer(part.name) for part in self.linears}
        return TouchedModules(
            linears=tuple(dict.fromkeys(names[linear] for linear in sorted(names))),
            layers=len({p.layer for p in self.linears if names[p.linear] not in OUTER_MODULES}),
            min_rank=min(part.rank for part in self.linears),
            parameters=sum(math.prod((p.a, p.b)[side].shape) for p, side in self._matrices())
            + sum(math.prod(rows.shape) for rows in {part.rows for part in self.token_rows})
            + sum(math.prod(span.shape) for part in self.vectors for span in part.spans.values())
            + (0 if self.head is None else self.head.parameters),
            tokens=len({each for part in self.token_rows for each in part.ids}),
        )

    def packed_elements(self, dims: Callable[[int], tuple[int, int]]) -> int:
        """Return the number of elements of the adapter's image: its weights, packed as on the GPU.

        Matrices are not padded to a common rank, begin at aligned offsets, and are counted for each
        expert, or once if experts share them. A linear with DoRA or a trained bias has two vectors
        in the image, a gain and a bias.

        dims: returns (d_in, d_out) of the module with this index: of the whole module, as
            BaseShape.dims does, or of its part on one GPU.
        """
        matrices = [p.matrices(s) * p.rank * dims(p.linear)[s] for p, s in self._matrices()]
        rows = [n for p in self.token_rows for n in (math.prod(p.rows.shape), 3 * len(p.ids))]
        vectors = [2 * dims(part.linear)[1] for part in self.vectors]
        labels = 0 if self.head is None else len(self.head.head.labels)
        head = [] if self.head is None else [labels * d for d in dims(self.head.linear)]
        return sum(map(aligned, matrices + rows + vectors + head))

    def _matrices(self) -> Iterator[tuple[LinearLora, int]]:
        """Yield each matrix as (its linear, 0 for A or 1 for B).

        A matrix that two linears share is yielded for the first only.
        """
        shared = self.shared_a
        for part in self.linears:
            held = (part.layer, part.linear) in shared
            yield from ((part, side) for side in range(held, 2))


def _without_layer(name: str) -> str:
    """Return the name of a linear within its layer, such as q_proj."""
    return name.removeprefix("layers.").lstrip("0123456789").removeprefix(".")


def aligned(elements: int) -> int:
    """Round a number of elements up to a multiple of ALIGNMENT."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def read_spec(blob: Path, shape: BaseShape, limits: AdapterLimits) -> AdapterSpec:
    """Validate an adapter's file against a base model, except the values of its tensors.

    Reads only the header; `check_values` checks the values.
    Raises AdapterRejected (field: the tensor, module or config key at fault) or AdapterTooLarge.
    """
    size = blob.stat().st_size
    if size > limits.max_bytes:
        raise AdapterTooLarge(
            f"the adapter has {size} bytes: the limit is {limits.max_bytes}",
            field="size",
            size_bytes=size,
            max_bytes=limits.max_bytes,
        )
    header = read_header(blob)
    if METADATA_KEY not in header.metadata:
        raise AdapterRejected(
            "not a packed adapter: make the blob with write_blob from PEFT's folder",
            field=f"__metadata__.{METADATA_KEY}",
        )
    config = LoraConfig.from_json(header.metadata[METADATA_KEY])
    _check_family(config, shape)
    matrices = dict(header.tensors)
    kinds = (token_rows_module, whole_module, head_part)
    rows, whole, of_head = (take_tensors(matrices, key) for key in kinds)
    vectors = take_vectors(matrices)
    pairs = pair_tensors(with_shared_a(matrices))
    for copy in parse_copies(header.metadata):
        _check_copy(copy, shape, pairs, {module.rpartition(".")[2] for module in whole})
    for key in (*config.rank_pattern, *config.alpha_pattern):
        if key not in pairs:
            raise AdapterRejected(f"a pattern names {key}, which has no weights", field=key)
    if EMBEDDINGS.module in rows and _leaves_out_the_scale(config, shape):
        raise AdapterRejected(
            f"PEFT before 0.18 trained these tokens while it left out the scale of all of "
            f"{FAMILIES[shape.family].name}'s embeddings, not only of these: train them with a "
            "newer PEFT",
            field=EMBEDDINGS.module,
        )
    linears = [_linear(module, pair, config, shape, limits) for module, pair in pairs.items()]
    linears.sort(key=lambda part: (part.layer, part.linear))
    _check_kinds(config, shape)
    _check_lost_biases(config, linears, shape)
    token_rows = read_token_rows(
        parse_rows(header.metadata, TOKENS_KEY),
        rows,
        parse_rows(header.metadata, MODULES_KEY),
        whole,
        pairs,
        shape,
        limits.max_added_tokens,
    )
    head, embedder = parse_head(header.metadata), parse_embedder(header.metadata)
    generates = head is None and embedder is None
    vocabulary = added_vocabulary(token_rows, shape, generates=generates)
    spec = AdapterSpec(
        base_model=config.base_model_name_or_path,
        linears=tuple(_with_alternation(linears, shape)),
        max_rank=max(part.rank for part in linears),
        size_bytes=size,
        token_rows=token_rows,
        vectors=_vectors(vectors, config, shape, {(p.layer, p.linear) for p in linears}),
        invocation_tokens=tuple(config.alora_invocation_tokens),
        head=read_head(head, of_head, shape, max(vocabulary, shape.vocabulary)),
        embedder=embedder,
        vocabulary=vocabulary,
    )
    if spec.invocation_tokens:
        _check_activated(spec, shape)
    return spec


def pair_tensors(
    tensors: Mapping[str, Span], split: Callable[[str], tuple[str, str]] = split_tensor_name
) -> dict[str, dict[str, Span]]:
    """Group LoRA tensors into pairs: {module: {"A": tensor, "B": tensor}}.

    tensors: the tensors by name.
    split: parses a tensor's name, and returns the module and the side, A or B.

    Raises AdapterRejected for incomplete pairs.
    """
    pairs: dict[str, dict[str, Span]] = {}
    for name, span in tensors.items():
        module, side = split(name)
        if pairs.setdefault(module, {}).setdefault(side, span) is not span:
            raise AdapterRejected(f"two tensors are lora_{side} of {module}", field=name)
    if not pairs:
        raise AdapterRejected("the file has no LoRA weights", field="header")
    for module, sides in pairs.items():
        for side in "AB":
            if side not in sides:
                missing = tensor_name(module, side)
                raise AdapterRejected(f"{missing} is missing beside its other half", field=missing)
        check_rank(module, sides)
    return pairs


def check_rank(module: str, sides: Mapping[str, TensorSpan], want: int | None = None) -> None:
    """Raise AdapterRejected unless a module's A is [rank, d_in], and its B [d_out, rank].

    Matrices of experts may have one dimension more, the first.

    sides: A and B of the module.
    want: LoRA rank according to the config; None: any rank.
    """
    a, b = sides["A"].shape, sides["B"].shape
    dimensions = (2, 3) if is_of_experts(module) else (2,)
    are_matrices = len(a) in dimensions and len(b) in dimensions
    if not are_matrices or a[-2] != b[-1] or 0 in (*a, *b):
        remedy = ": gather what ZeRO or FSDP keeps in other processes before saving"
        raise AdapterRejected(
            f"{module}: lora_A {list(a)} and lora_B {list(b)} are not [rank, d_in], [d_out, rank]"
            f"{remedy if 0 in (*a, *b) else ''}",
            field=module,
        )
    if want is not None and a[-2] != want:
        raise AdapterRejected(
            f"{module}: the weights have rank {a[-2]} and the config says {want}", field=module
        )


def _linear(
    module: str,
    sides: Mapping[str, TensorSpan],
    config: LoraConfig,
    shape: BaseShape,
    limits: AdapterLimits,
) -> LinearLora:
    layer, linear = _place(module, shape)
    check_rank(module, sides, want=config.rank(module))
    rank = sides["A"].shape[-2]
    if rank > limits.max_rank:
        joined = ", the sum of those of q, k and v if they were trained apart, as by Tinker"
        raise AdapterTooLarge(
            f"{module} has rank {rank}{joined if parts_of(module) else ''}: the limit is "
            f"{limits.max_rank}",
            field=module,
            rank=rank,
            max_rank=limits.max_rank,
        )
    _check_experts(module, sides, shape, linear)
    got, want = (sides["A"].shape[-1], sides["B"].shape[-2]), shape.dims(linear)
    if got != want and module == EMBEDDINGS.module and got == want[::-1]:
        raise AdapterRejected(
            f"{module} has the matrices of a head, as Tinker exports its unembedding for a base "
            "model with tied embeddings: train with train_unembed=False",
            field=module,
        )
    _check_reading(module, got, config, shape, linear)
    if got != want:
        raise AdapterRejected(
            f"{module} maps {got[0]} to {got[1]} and the base model's {want[0]} to {want[1]}: "
            "the adapter was trained for another base model",
            field=module,
        )
    found, name = shape.modules[linear], _name(layer, linear, shape)
    scaling, spans = config.scaling(module), (sides["A"], sides["B"])
    if found.gathers and _leaves_out_the_scale(config, shape):
        scaling /= math.sqrt(shape.hidden)  # by which the engine multiplies
    return LinearLora(
        layer, linear, name, rank, scaling, *spans, found.gathers, shape.matrices(linear)
    )


def _name(layer: int, linear: int, shape: BaseShape) -> str:
    """Return a module's name for error messages, such as layers.0.q_proj."""
    name = shape.modules[linear].name
    return name if layer == shape.outer_layer else f"layers.{layer}.{name}"


def _vectors(
    found: Mapping[str, Mapping[str, TensorSpan]],
    config: LoraConfig,
    shape: BaseShape,
    adapted: Set[tuple[int, int]],
) -> tuple[LinearVectors, ...]:
    """Locate DoRA's magnitudes and the biases in an adapter's file.

    found: vectors by module, then by kind: MAGNITUDE (DoRA's), LORA_BIAS or BIAS.
    adapted: (layer, linear) of all linears that have A and B.

    Raises AdapterRejected for vectors that do not fit the base model or its linears.
    """
    vectors = []
    for module, spans in found.items():
        check_has_place(module, spans)
        layer, linear = _place(module, shape)
        check_widths(module, spans, shape.dims(linear)[1])
        if BIAS in spans and not shape.has_bias(linear):
            raise AdapterRejected(
                f"{module} has a trained bias, and the base model has none there: the adapter was "
                "trained for another base model",
                field=module,
            )
        if spans.keys() - {BIAS} and (layer, linear) not in adapted:
            kind = next(iter(spans))
            raise AdapterRejected(f"{module} has {kind} and no lora_A and B", field=module)
        name = _name(layer, linear, shape)
        vectors.append(LinearVectors(layer, linear, name, config.scaling(module), spans))
    return tuple(sorted(vectors, key=lambda part: (part.layer, part.linear)))


def _check_activated(spec: AdapterSpec, shape: BaseShape) -> None:
    """Raise AdapterRejected for an activated LoRA that PEFT cannot train, or that changes the
    computation of tokens before its invocation.

    PEFT activates LoRA of linears alone, with or without a bias of B. Keys and values that
    kv_b_proj makes of tokens before the invocation are the base model's, but latent attention
    multiplies an adapter of kv_b_proj into the queries of later tokens.
    """
    last = max(spec.invocation_tokens)
    if last >= shape.vocabulary:
        raise AdapterRejected(
            f"the invocation has token {last}, and the base model's vocabulary {shape.vocabulary} "
            "tokens: the adapter was trained for another base model",
            field=_INVOCATION,
        )
    names = [part.name for part in spec.token_rows]
    names += [] if spec.head is None else [SCORE.name]
    names += [
        part.name
        for part in spec.linears
        if part.gathers
        or shape.modules[part.linear].of_experts
        or shape.modules[part.linear].group == "kv_b"
    ]
    names += [
        part.vector(kind) for part in spec.vectors for kind in part.spans if kind != LORA_BIAS
    ]
    if names:
        raise AdapterRejected(
            f"{names[0]} cannot be trained by activated LoRA, only A and B of linears, with "
            "lora_bias or without it, and not of experts or kv_b_proj: leave it out, or train a "
            "plain LoRA",
            field=names[0],
        )


def _check_lost_biases(config: LoraConfig, linears: Sequence[LinearLora], shape: BaseShape) -> None:
    """Raise AdapterRejected if biases of the base model were trained but not saved.

    config: tells whether biases may have been lost.
    """
    family = FAMILIES[shape.family]
    for part in linears if config.lost_biases and family.usually_has_qkv_bias else ():
        if shape.modules[part.linear].group == "qkv":
            raise AdapterRejected(
                f"PEFT before 0.21 trained the bias of {family.name}'s {part.name} and did not "
                "save it: train with bias='none'",
                field="bias",
            )


def _leaves_out_the_scale(config: LoraConfig, shape: BaseShape) -> bool:
    """Whether the adapter was trained without the factor by which the base model multiplies
    embeddings.
    """
    return config.unscaled_embeddings and FAMILIES[shape.family].scales_in_module


def _check_experts(
    module: str, sides: Mapping[str, TensorSpan], shape: BaseShape, linear: int
) -> None:
    experts, of_experts = shape.matrices(linear), shape.modules[linear].of_experts
    for side, span in sides.items():
        stacked = span.shape[:-2]
        if stacked not in ({(1,), (experts,)} if of_experts else {()}):
            count = stacked[0] if stacked else "no"
            raise AdapterRejected(
                f"{module}: lora_{side} is for {count} experts and the base model has {experts}: "
                "the adapter was trained for another base model",
                field=module,
            )


def _check_reading(
    module: str, dims: tuple[int, int], config: LoraConfig, shape: BaseShape, linear: int
) -> None:
    """Raise AdapterRejected if experts' matrices were read for another kind of base model.

    Which side of a parameter is the input depends on PEFT's release, and differs between gpt-oss
    and other base models. A wrong reading shows in the widths, unless the parameter is square.

    dims: (d_in, d_out) of the module's matrices.
    linear: index of the module in the shape's modules.
    """
    want, experts = shape.dims(linear), FAMILIES[shape.family].experts
    if not config.experts_read_for or experts is None or not shape.modules[linear].of_experts:
        return
    of_base = experts_kind(clamped=experts.clamped)
    parts = len(shape.groups[shape.modules[linear].group])  # of the parameter
    if of_base != config.experts_read_for and (dims != want or want[0] == parts * want[1]):
        name = FAMILIES[shape.family].name
        raise AdapterRejected(
            f"{module}: PEFT's weights do not show which side is the input, and were read for "
            f"{config.experts_read_for}, by base_model_name_or_path; the base model is {name}: "
            "give the name of the base model in adapter_config.json, and register again",
            field="base_model_name_or_path",
        )


def _with_alternation(linears: Sequence[LinearLora], shape: BaseShape) -> list[LinearLora]:
    """Mark the linears whose B have alternating rows, as PEFT trains gate_up_proj of gpt-oss.

    linears: adapted linears, sorted by layer, then by index in the shape's modules. A gate_proj and
        up_proj with one A were cut out of a gate_up_proj.

    Raises AdapterRejected if all experts share the B of gate_proj or of up_proj, but not both: such
    B cannot be halves of one B.
    """
    found, experts = list(linears), FAMILIES[shape.family].experts
    if experts is None or not experts.clamped:
        return found
    for at, (gate, up) in enumerate(pairwise(linears)):
        if gate.a == up.a:
            if gate.b.shape != up.b.shape:
                raise AdapterRejected(
                    f"{up.matrix('B')} is {list(up.b.shape)} and {gate.matrix('B')} "
                    f"{list(gate.b.shape)}: want the halves of one gate_up_proj",
                    field=up.matrix("B"),
                )
            found[at : at + 2] = replace(gate, half=0), replace(up, half=1)
    return found


def _check_family(config: LoraConfig, shape: BaseShape) -> None:
    if config.families is not None and shape.family not in config.families:
        raise AdapterRejected(
            f"its config selects linears of {FAMILIES[shape.family].name} that have no weights: "
            "the file is incomplete, or exclude_modules must leave them out",
            field="target_modules",
        )


def _check_kinds(config: LoraConfig, shape: BaseShape) -> None:
    """Raise AdapterRejected if the config targets linears that have no weights in the adapter.

    Finds linears that only some kinds of decoder layers have, such as attention's among layers of
    which others are delta nets; other checks find the rest.

    config: LoraConfig whose `kinds` has, for each layer, the kinds that agree with the weights.
    """
    for layer, kinds in enumerate(config.kinds[: shape.layers]):
        if shape.kind(layer) not in kinds:
            raise AdapterRejected(
                f"its config selects linears of layer {layer}, {shape.kind(layer).words} in the "
                "base model, that have no weights: the file is incomplete, or it was trained for "
                "another base model",
                field="target_modules",
            )


def _check_copy(
    copy: BaseCopy, shape: BaseShape, adapted: Collection[str], whole: Collection[str]
) -> None:
    """Raise AdapterRejected for a copy of another width than the base model's matrix, or of another
    number of rows if the blob has its hash alone.

    adapted: modules that have LoRA, named as in blobs.
    whole: modules that the blob has whole, of embed_tokens and lm_head.
    """
    want = (shape.vocabulary, shape.hidden)
    is_resized = copy.shape[:-1] != want[:-1] and copy.module not in whole
    if not is_resized and copy.shape[-1:] == want[-1:] and len(copy.shape) == 2:
        return
    has_lora = not {HEAD.module, EMBEDDINGS.module}.isdisjoint(adapted)
    if has_lora:
        remedy = (
            "LoRA of lm_head or embed_tokens with a resized vocabulary cannot be served; train "
        )
        remedy += 'modules_to_save=["embed_tokens", "lm_head"]'
    else:
        remedy = "to serve a resized vocabulary, set LORIKEET_MAX_ADAPTER_BYTES to the size of the "
        remedy += "adapter's folder or more"
    raise AdapterRejected(
        f"the file's {copy.module}.weight is {list(copy.shape)} and the base model's {list(want)}: "
        f"{remedy}",
        field=copy.module,
    )


def _place(module: str, shape: BaseShape) -> tuple[int, int]:
    """Return (layer, index in the shape's modules) of a module, named as in stored adapters."""
    for outer in OUTER:
        if module == outer.module:
            if outer not in shape.modules:
                raise AdapterRejected(
                    f"the base model has no {module}; was this trained for another?", field=module
                )
            return shape.outer_layer, shape.index(outer.name)
    layer, linear = locate_module(module, shape.linears)
    if module != shape.linears[linear].path(layer):
        raise AdapterRejected(
            f"{module} is not what packed adapters call {shape.linears[linear].path(layer)}: make "
            "the blob with write_blob from PEFT's folder",
            field=module,
        )
    if layer >= shape.layers:
        raise AdapterRejected(
            f"{module}: the base model has {shape.layers} layers; was this trained for another?",
            field=module,
        )
    linear = shape.in_layer(layer, linear)
    if not shape.has(layer, linear):
        doubt = "was this trained for another?"
        if shape.kv_owner(layer) != layer:
            doubt = (
                f"transformers before {_WITHOUT_UNUSED} had one there, which answers do not use: "
                "remove its matrices if lora_B is 0, else train again with a newer release"
            )
        raise AdapterRejected(
            f"{module}: layer {layer} of the base model is {shape.kind(layer).words} and has no "
            f"{shape.linears[linear].name}; {doubt}",
            field=module,
        )
    return layer, linear
