"""Names of PEFT's tensors: base_model.model.<module>.lora_A[.default].weight.

A blob has one canonical name for each tensor. Trainers save variants, with wrappers of the model or
its layers (`_orig_mod`, FSDP), the adapter's name, or the language model's path in a larger model.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from lorikeet_engine.adapter_format.experts.names import GATE, UP, is_of_experts, linear_of, modern
from lorikeet_engine.adapter_format.families import (
    EMBEDDINGS,
    FAMILIES,
    HEAD,
    LAYER_INPUTS,
    OUTER,
    Linear,
)
from lorikeet_engine.adapter_format.header import TensorSpan
from lorikeet_engine.errors import AdapterRejected

_Key = TypeVar("_Key", bound=Hashable)
_Tensor = TypeVar("_Tensor", bound=TensorSpan)
_TENSOR = re.compile(
    r"base_model\.model\.([\w.]{1,256})\."
    r"(?:lora_([AB])(?:\.default)?\.weight|(?<=embed_tokens\.)lora_embedding_([AB])(?:\.default)?)"
)
_SAVED = re.compile(
    r"(?:base_model\.model\.)?([\w.]{1,256})\."
    r"(?:lora_([AB])(?:\.[\w-]{1,64})?\.weight"
    r"|(?:(?<=embed_tokens\.)|(?<=embeddings\.))lora_embedding_([AB])(?:\.[\w-]{1,64})?)"
)
# Of DoRA, of lora_bias, and of biases that were trained with the adapter.
_SAVED_VECTOR = re.compile(
    r"(?:base_model\.model\.)?([\w.]{1,256}?)\."
    r"(?:(lora_magnitude_vector)(?:\.[\w-]{1,64})?(?:\.weight)?|(lora_B)(?:\.[\w-]{1,64})?\.bias"
    r"|(?:base_layer\.)?(bias))"
)
_SAVED_ROWS = re.compile(
    r"(?:base_model\.model\.)?([\w.]{1,256})\.token_adapter\.trainable_tokens_delta"
    r"(?:\.[\w-]{1,64})?"
)
# Of torch.compile, FSDP, activation checkpointing and data parallelism.
_WRAPPERS = re.compile(
    r"^(?:_orig_mod\.)?module\.|\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Tinker's name for self_attn of gpt-oss (tinker-cookbook 0.6.1, weights/_merge_gpt_oss.py).
_TINKER_ATTENTION = re.compile(r"(\blayers\.[0-9]{1,6}\.)attn\.")
# Nemotron's code on the Hub has `backbone` where other models have `model`.
_MODELS = r"(?:(?:language_)?model\.|backbone\.)"
_SAVED_MODULE = re.compile(rf"({_MODELS}{{0,3}})(layers\.([0-9]{{1,6}})\.[\w.]+)")
_COPY = re.compile(
    rf"(?:base_model\.model\.)?{_MODELS}{{0,2}}(lm_head|embed_tokens|embeddings)"
    r"((?:\.token_adapter)?\.base_layer|\.original_module|\.modules_to_save(?:\.[\w-]{1,64})?)?"
    r"\.weight"
)
_WHOLE = re.compile(r"base_model\.model\.(lm_head|model\.embed_tokens)\.modules_to_save\.weight")
# Parts of models that see images or hear sounds: encoders, and projectors to hidden states.
_VISION = re.compile(
    r"(?:base_model\.model\.)?(?:model\.){0,2}(?:visual|vision_tower|vision_model"
    r"|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector|mm_projector|mlp1)(?:\.|$)"
)
# Of VeLoRA and MonteCLoRA, which compute a plain LoRA once it is trained.
_TRAINING_STATE = re.compile(r"\.lora_(?:velora|monteclora)_\w+\b")
_SAVED_OUTER = re.compile(
    rf"{_MODELS}{{0,3}}(lm_head|embed_tokens|embeddings|per_layer_model_projection)"
)
_OURS = {"embeddings": EMBEDDINGS.name}
_MODULE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.([\w.]+)")
_PART = re.compile(r"((?:.*\.)?linear_attn\.in_proj_)([qkv])")
MAGNITUDE, LORA_BIAS, BIAS = "lora_magnitude_vector", "lora_B.bias", "bias"
"""Kinds of vectors that an adapter can have for a linear, by the endings of their names in blobs:
DoRA's magnitudes of the rows, a bias of B, and a bias that replaces the base model's."""
PARTS = ("q", "k", "v")
"""Endings of the matrices that trainers may adapt apart, in the order in which in_proj_qkv stacks
them."""
_NO_LINEAR = re.compile(r"\.(?:linear_attn|mamba|mixer)\.(?:conv1d|A_log|D|dt_bias|norm)(?:\.|$)")
_REFUSED = {
    "lora_embedding_": "only embed_tokens can have such weights",
    "modules_to_save": "whole modules cannot be served; train without modules_to_save",
    "_bias": "only biases of linears can be served; train with bias='lora_only'",
    "original_module": "whole modules cannot be served; train without modules_to_save",
    ".base_layer.": "the base model's own weights are in the file; save the adapter alone",
}


def take_tensors(
    tensors: dict[str, _Tensor], key_of: Callable[[str], _Key | None]
) -> dict[_Key, _Tensor]:
    """Remove the tensors of one kind from `tensors`, and return them by a key.

    tensors: tensors by name, of a trainer's file or of a blob (stored adapter).
    key_of: returns a tensor's key, given its name; None for tensors of other kinds.

    Raises AdapterRejected if two tensors have the same key.
    """
    names: dict[_Key, str] = {}
    for name in tensors:
        if (key := key_of(name)) is not None and names.setdefault(key, name) != name:
            raise AdapterRejected(f"{names[key]} and {name} are the same tensor", field=name)
    return {key: tensors.pop(name) for key, name in names.items()}


def split_tensor_name(name: str) -> tuple[str, str]:
    """Parse the name of a LoRA tensor in a blob (adapter's file): return (module, "A" or "B").

    Raises AdapterRejected for any other name; the error names the part that is not supported.
    """
    match = _TENSOR.fullmatch(name)
    if match:
        return match[1], match[2] or match[3]
    for part, remedy in _REFUSED.items():
        if part in name:
            raise AdapterRejected(f"tensor {name}: {remedy}", field=name)
    raise AdapterRejected(f"tensor {name} is not part of a LoRA adapter", field=name)


def split_saved_name(name: str) -> tuple[str, str]:
    """Parse the name of a LoRA tensor in a trainer's file: return (module, "A" or "B").

    The module is named as in the trainer's config. Raises AdapterRejected if the tensor is not
    part of a LoRA adapter, or of a part of a delta net or Mamba 2 that is no linear.
    """
    if _NO_LINEAR.search(name):
        raise AdapterRejected(
            f"tensor {name}: conv1d, A_log, D, dt_bias and norm of a delta net or Mamba 2 cannot "
            "be adapted; train its linears alone",
            field=name,
        )
    match = _SAVED.fullmatch(_TINKER_ATTENTION.sub(r"\1self_attn.", _WRAPPERS.sub("", name)))
    return (match[1], match[2] or match[3]) if match else split_tensor_name(name)


def without_originals(tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Return a trainer's tensors without copies of a matrix that is there as modules_to_save.

    With a resized vocabulary, PEFT saves such a module thrice: twice as trained, and once as it was
    before the training.
    """
    found = {name: _COPY.fullmatch(_WRAPPERS.sub("", name)) for name in tensors}
    copies = {name: match[1] for name, match in found.items() if match}
    trained = {module for name, module in copies.items() if ".modules_to_save." in name}
    dropped = {n for n, module in copies.items() if module in trained and "_to_save." not in n}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}


def copied_module(name: str) -> str | None:
    """Return the base model's matrix that a trainer's tensor is a copy of: lm_head or embed_tokens.

    None for other tensors.
    """
    match = _COPY.fullmatch(_WRAPPERS.sub("", name))
    return _OURS.get(match[1], match[1]) if match else None


def is_of_vision(name: str) -> bool:
    """Whether a trainer's tensor or module is of the vision part of a vision-language model.

    Answers to texts do not depend on this part.
    """
    return _VISION.match(_WRAPPERS.sub("", name)) is not None


def is_training_state(name: str) -> bool:
    """Whether a trainer's tensor is state of a training method, which answers do not depend on."""
    return _TRAINING_STATE.search(name) is not None


def split_vector_name(name: str) -> tuple[str, str] | None:
    """Parse the name of a linear's vector: return (module, kind).

    The kind is MAGNITUDE (DoRA's), LORA_BIAS (bias of B) or BIAS (replaces the base model's). The
    module is named as in the trainer's config. None for other tensors.

    name: the tensor's name, in a trainer's file or in a blob (stored adapter).
    """
    if "lora_magnitude_vector" not in name and not name.endswith("bias"):
        return None  # as of nearly all names: a substitution takes longer than everything else here
    match = _SAVED_VECTOR.fullmatch(_TINKER_ATTENTION.sub(r"\1self_attn.", _WRAPPERS.sub("", name)))
    if match is None or "lora_" in match[1] or _NO_LINEAR.search(name):
        return None
    return match[1], MAGNITUDE if match[2] else LORA_BIAS if match[3] else BIAS


def vector_name(module: str, kind: str) -> str:
    """Return the name that a linear's vector has in blobs (stored adapters).

    module: name of the linear in blobs.
    kind: MAGNITUDE, LORA_BIAS or BIAS.
    """
    return f"base_model.model.{module}.{kind}"


def token_rows_module(name: str) -> str | None:
    """Return the module whose trained rows a tensor holds, named as in blobs; None for others.

    Raises AdapterRejected if the module is neither embed_tokens nor lm_head.

    name: the tensor's name, in a trainer's file or in a blob (stored adapter).
    """
    if "trainable_tokens_delta" not in name:
        return None
    match = _SAVED_ROWS.fullmatch(_WRAPPERS.sub("", name))
    if match is None:
        return None
    module = canonical_module(match[1])
    if module not in (HEAD.module, EMBEDDINGS.module):
        raise AdapterRejected(f"tensor {name}: only embed_tokens and lm_head have rows", field=name)
    return module


def token_rows_name(module: str) -> str:
    """Return the name, in blobs (stored adapters), of the tensor of a module's trained rows."""
    return f"base_model.model.{module}.token_adapter.trainable_tokens_delta"


def whole_module(name: str) -> str | None:
    """Return the whole module (see `whole_name`) whose rows a tensor holds; None for other tensors.

    name: the tensor's name in a blob (stored adapter).
    """
    match = _WHOLE.fullmatch(name)
    return match[1] if match else None


def whole_name(module: str) -> str:
    """Return the name that the tensor with a whole module's rows has in blobs (stored adapters).

    A whole module is one that PEFT trains in full, not by LoRA, as `modules_to_save` names it.

    module: the module's name in blobs: lm_head or model.embed_tokens.
    """
    return f"base_model.model.{module}.modules_to_save.weight"


def canonical_module(saved: str) -> str:
    """Return the name that a module in a trainer's file gets in blobs (stored adapters).

    model.language_model.layers.0 → model.layers.0.

    saved: the module's name in the file.
    """
    for outer in OUTER:
        if is_outer(saved, outer):
            return outer.module
    match = _SAVED_MODULE.fullmatch(saved)
    return modern(f"model.{match[2].removesuffix('.weight')}" if match else saved)


def part_of(module: str) -> tuple[str, str] | None:
    """Return the linear that a module is one of three parts of, and the part's ending, of PARTS.

    linear_attn.in_proj_q → linear_attn.in_proj_qkv, q. None for any other module.
    """
    match = _PART.fullmatch(module)
    return (f"{match[1]}{''.join(PARTS)}", match[2]) if match else None


def whole_of(module: str) -> str:
    """Return the linear that a module is a part of, or the module itself if it is no part."""
    part = part_of(module)
    return part[0] if part else module


def parts_of(linear: str) -> tuple[str, ...]:
    """Return the names of a linear's parts, which a trainer may adapt apart; () if it has none."""
    whole = "".join(PARTS)
    before = linear.removesuffix(whole)
    names = tuple(before + part for part in PARTS)
    return names if part_of(names[0]) == (linear, PARTS[0]) else ()


def is_outer(saved: str, outer: Linear) -> bool:
    """Whether a module in a trainer's file is `outer`, a module outside the decoder layers.

    outer: one of OUTER. LAYER_INPUTS among them may be named as a parameter, with .weight.
    """
    match = _SAVED_OUTER.fullmatch(
        saved.removesuffix(".weight") if outer is LAYER_INPUTS else saved
    )
    return match is not None and _OURS.get(match[1], match[1]) == outer.name


def layers_prefix(saved: Iterable[str]) -> str:
    """Return the path before "layers." in the names of a decoder's modules.

    saved: names of modules, in the trainer's naming.

    Raises AdapterRejected if they are modules of several decoders.
    """
    matches = [match for match in map(_SAVED_MODULE.fullmatch, saved) if match]
    places = {match[1] for match in matches}
    if len(places) > 1:
        one, other = sorted(places)[:2]
        raise AdapterRejected(
            f"there are layers under {one}layers and under {other}layers: want those of one model",
            field=f"{other}layers",
        )
    return places.pop() if places else "model."


def layer_of(saved: str) -> str:
    """Return the number of the decoder layer that contains a module, as written in its name."""
    match = _SAVED_MODULE.fullmatch(saved)
    assert match is not None
    return match[3]


def tensor_name(module: str, side: str) -> str:
    """Return the name that a LoRA matrix has in blobs (stored adapters).

    module: name of the adapted module in blobs.
    side: A or B.
    """
    if module == EMBEDDINGS.module:
        return f"base_model.model.{module}.lora_embedding_{side}"
    return f"base_model.model.{module}.lora_{side}.weight"


def linears_of(modules: Sequence[str]) -> tuple[Linear, ...]:
    """Return the linears of a decoder layer, in the family of base models that fits best.

    modules: names of modules in blobs (stored adapters); the family that has most of these modules
        fits best.
    """
    modules = [linear_of(module) for module in modules]
    paths = [match[2] for match in map(_MODULE.fullmatch, modules) if match]

    def known(linears: tuple[Linear, ...]) -> int:
        return sum(map(paths.count, {linear.module for linear in linears}))

    return max((family.linears for family in FAMILIES.values()), key=known)


def locate_module(module: str, linears: Sequence[Linear]) -> tuple[int, int]:
    """Return a module's place: (number of the decoder layer, index of the linear in `linears`).

    module: the module's name in blobs (stored adapters).
    linears: linears of a decoder layer.

    Raises AdapterRejected for a module that is none of the linears.
    """
    match = _MODULE.fullmatch(linear_of(module))
    for index, linear in enumerate(linears):
        if match and match[2] == linear.module:
            return int(match[1]), index
    paths = (linear.module for linear in linears)
    names = ", ".join(dict.fromkeys(path.partition(".")[2] or path for path in paths))
    raise AdapterRejected(
        f"module {module} cannot be adapted: want {names} of a decoder layer, {HEAD.name} or "
        f"{EMBEDDINGS.name}",
        field=module,
    )


def with_shared_a(tensors: Mapping[str, TensorSpan]) -> dict[str, TensorSpan]:
    """Return an adapter's matrices, with an A for each experts' up_proj that shares gate_proj's A.

    tensors: the matrices in the adapter's file, by name; such an up_proj has only a B there.
    """
    found = dict(tensors)
    for name in tensors:
        module, _ = split_tensor_name(name)
        if module.endswith(f".{UP}") and is_of_experts(module):
            own = tensor_name(module, "A")
            gates = tensor_name(f"{module.removesuffix(UP)}{GATE}", "A")
            if own not in tensors and gates in tensors:
                found[own] = tensors[gates]
    return found
