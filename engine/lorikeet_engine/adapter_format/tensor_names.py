"""What a PEFT tensor's name says: base_model.model.<module>.lora_A[.default].weight."""

import re
from collections.abc import Sequence

from lorikeet_engine.adapter_format.families import FAMILIES, Linear
from lorikeet_engine.errors import AdapterRejected

_TENSOR = re.compile(r"base_model\.model\.([\w.]{1,256})\.lora_([AB])(?:\.default)?\.weight")
_MODULE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.([\w.]+)")
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported; train with use_dora=False",
    "lora_embedding_": "LoRA on embeddings is not supported; leave embed_tokens out",
    "embed_tokens": "embeddings cannot be adapted or trained; leave embed_tokens out",
    "lm_head": "lm_head cannot be adapted or trained; leave it out",
    "modules_to_save": "whole modules cannot be served; train without modules_to_save",
    ".bias": "biases are not supported; train with bias='none' and lora_bias=False",
    "original_module": "whole modules cannot be served; train without modules_to_save",
    ".base_layer.": "the base model's own weights are in the file; save the adapter alone",
}


def split_tensor_name(name: str) -> tuple[str, str]:
    """(module, "A" or "B"). Raises AdapterRejected, naming what is not supported."""
    match = _TENSOR.fullmatch(name)
    if match:
        return match[1], match[2]
    for part, remedy in _REFUSED.items():
        if part in name:
            raise AdapterRejected(f"tensor {name}: {remedy}", field=name)
    raise AdapterRejected(f"tensor {name} is not part of a LoRA adapter", field=name)


def tensor_name(module: str, side: str) -> str:
    """The one name that this tensor has in a blob."""
    return f"base_model.model.{module}.lora_{side}.weight"


def linears_of(modules: Sequence[str]) -> tuple[Linear, ...]:
    """The linears of the family that these modules are of, where nobody says which base model.

    That is the family which has the most of them.
    """
    paths = [match[2] for match in map(_MODULE.fullmatch, modules) if match]

    def known(linears: tuple[Linear, ...]) -> int:
        return sum(map(paths.count, (linear.module for linear in linears)))

    return max((family.linears for family in FAMILIES.values()), key=known)


def locate_module(module: str, linears: Sequence[Linear]) -> tuple[int, int]:
    """(layer, index in linears). Raises AdapterRejected for modules that cannot be adapted."""
    match = _MODULE.fullmatch(module)
    for index, linear in enumerate(linears):
        if match and match[2] == linear.module:
            return int(match[1]), index
    names = ", ".join(linear.name for linear in linears)
    raise AdapterRejected(
        f"module {module} cannot be adapted: want {names} of a decoder layer", field=module
    )
