"""Vectors of a linear beside its A and B: DoRA's magnitudes, and trained biases.

DoRA (Liu et al. 2024, arXiv 2402.09353) rescales each row of W + scaling · B·A to a trained
magnitude. PEFT's lora_bias adds a bias to B. Its option bias trains the base model's own biases, of
which a file has the new values.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lorikeet_engine.adapter_format.experts.names import is_of_experts
from lorikeet_engine.adapter_format.families import EMBEDDINGS, HEAD
from lorikeet_engine.adapter_format.header import TensorSpan
from lorikeet_engine.adapter_format.tensor_names import (
    BIAS,
    LORA_BIAS,
    MAGNITUDE,
    canonical_module,
    linears_of,
    locate_module,
    part_of,
    split_vector_name,
    take_tensors,
    vector_name,
)
from lorikeet_engine.errors import AdapterRejected

Tensor = TypeVar("Tensor", bound=TensorSpan)
Vectors = Mapping[str, Mapping[str, Tensor]]
"""Vectors by canonical module, then by kind: MAGNITUDE, LORA_BIAS or BIAS."""

_OPTIONS = {MAGNITUDE: "use_dora", LORA_BIAS: "lora_bias", BIAS: "bias"}
_METHODS = {MAGNITUDE: "DoRA", LORA_BIAS: "lora_bias", BIAS: "a trained bias"}
_ABSORBED = ".kv_b_proj"
"""Linear of latent attention that is multiplied into queries and outputs, so that nothing holds its
product."""


@dataclass(frozen=True, slots=True)
class LinearVectors:
    """Vectors [d_out] that an adapter has for one linear.

    layer: index of the decoder layer; BaseShape.outer_layer for modules outside the layers.
    linear: index of the linear in BaseShape.modules.
    name: the linear's name, for error messages.
    scaling: factor of B @ A, and of B's bias.
    spans: places of the vectors in the adapter's file, by kind: MAGNITUDE (DoRA's), LORA_BIAS (of
        B) or BIAS.
    """

    layer: int
    linear: int
    name: str
    scaling: float
    spans: Mapping[str, TensorSpan] = field(hash=False)

    def vector(self, kind: str) -> str:
        """Return the name of one of the vectors, for error messages.

        kind: MAGNITUDE, LORA_BIAS or BIAS.
        """
        return f"{self.name}.{kind}"


def take_vectors(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Remove DoRA's magnitudes and trained biases from `tensors`; return them by module and kind.

    Modules are named as in blobs (stored adapters); kinds are MAGNITUDE, LORA_BIAS and BIAS.

    tensors: tensors by name, of a trainer's file or of a blob.

    Raises AdapterRejected if two tensors are the same vector.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for (module, kind), tensor in take_tensors(tensors, _canonical_vector).items():
        found.setdefault(module, {})[kind] = tensor
    return found


def check_vectors(raw: Mapping[str, Any], vectors: Vectors[Tensor], pairs: Collection[str]) -> None:
    """Check the vectors of a trainer's file against its config.

    raw: PEFT's config.
    pairs: modules that have A and B, named as in blobs (stored adapters).

    Raises AdapterRejected if the config does not mention vectors that the file has, if the file
    lacks vectors that the config demands, or if a module is no linear that can have vectors.
    """
    for module, kinds in vectors.items():
        check_has_place(module, kinds)
        if module not in pairs:
            locate_module(module, linears_of([module, *pairs]))
        for kind in kinds:
            if raw.get(_OPTIONS[kind]) in (None, False, "none"):
                raise AdapterRejected(
                    f"{vector_name(module, kind)} is {_METHODS[kind]}, and adapter_config.json "
                    f"does not say so: set {_OPTIONS[kind]} as it was in the training",
                    field=_OPTIONS[kind],
                )
    for kind in (MAGNITUDE, LORA_BIAS):
        for module in pairs if raw.get(_OPTIONS[kind]) else ():
            check_has_place(module, [kind])
            if kind not in vectors.get(module, {}):
                missing = vector_name(module, kind)
                raise AdapterRejected(
                    f"{missing} is missing, and {_OPTIONS[kind]} is set: save the adapter again",
                    field=missing,
                )


def check_has_place(module: str, kinds: Collection[str]) -> None:
    """Raise AdapterRejected for a module that can have LoRA, but not these vectors.

    module: name of the module in blobs (stored adapters).
    kinds: kinds of its vectors, which the error names.
    """
    if {MAGNITUDE, LORA_BIAS} <= {*kinds}:  # PEFT refuses both in one config
        raise AdapterRejected(f"{module} has DoRA and lora_bias: train one of them", field=module)
    outer = module in (HEAD.module, EMBEDDINGS.module)
    if outer or is_of_experts(module) or part_of(module) or module.endswith(_ABSORBED):
        kind = next(iter(kinds))
        raise AdapterRejected(
            f"{module} cannot have {_METHODS[kind]}, only other linears of decoder layers can: "
            f"leave it out of target_modules, or train without {_OPTIONS[kind]}",
            field=module,
        )


def check_widths(module: str, vectors: Mapping[str, TensorSpan], d_out: int) -> None:
    """Raise AdapterRejected unless all vectors of a module are [d_out].

    module: name of the module in blobs (stored adapters).
    """
    for kind, span in vectors.items():
        if span.shape != (d_out,):
            raise AdapterRejected(
                f"{vector_name(module, kind)} is {list(span.shape)} and the base model's linear "
                f"has {d_out} outputs: the adapter was trained for another base model",
                field=module,
            )


def _canonical_vector(name: str) -> tuple[str, str] | None:
    """Return (module's name in stored adapters, kind) of a tensor's vector; else None."""
    vector = split_vector_name(name)
    return (canonical_module(vector[0]), vector[1]) if vector else None
