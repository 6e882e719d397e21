"""Variants of a blob: the same adapter with another scaling, with B transposed or modules left out.

A replica scores a trainer's tokens with variants to find how the trainer's adapter differs from the
served one.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lorikeet_engine.adapter_format.families import SCORE
from lorikeet_engine.adapter_format.header import (
    DTYPE_BYTES,
    BlobHeader,
    TensorSpan,
    header_bytes,
    read_header,
)
from lorikeet_engine.adapter_format.lora_config import LoraConfig
from lorikeet_engine.adapter_format.score_head import head_part
from lorikeet_engine.adapter_format.spec import METADATA_KEY
from lorikeet_engine.adapter_format.tensor_names import (
    split_tensor_name,
    split_vector_name,
    token_rows_module,
    whole_module,
)

_WORDS = {1: "uint8", 2: "uint16", 4: "uint32"}


class VariantKind(Enum):
    """Difference between an adapter and a variant of it: what a trainer may do otherwise."""

    SCALING = "scaling"
    TRANSPOSED = "transposed"
    MODULES = "modules"


@dataclass(frozen=True, slots=True)
class Variant:
    """An adapter with one difference, tried to find how its trainer computed otherwise.

    says: the difference, as an end of the sentence "the trainer computed this adapter …".
    config: the variant's config.
    left_out: modules, named as in blobs (stored adapters), whose matrices and vectors are left out.
    """

    kind: VariantKind
    says: str
    config: LoraConfig
    left_out: frozenset[str] = frozenset()


class BlobOutline(NamedTuple):
    """Adapted linears and scaling of a blob, an adapter's file.

    linears: names of the adapted linears within their layer, such as self_attn.q_proj, sorted.
    scaling: factor of B @ A that all modules have; None if modules differ.
    """

    linears: tuple[str, ...]
    scaling: float | None


class _Parts(NamedTuple):
    header: BlobHeader
    config: LoraConfig
    modules: dict[str, str]


def outline(blob: Path) -> BlobOutline:
    """Read adapted linears and scaling from a blob, an adapter's file.

    Raises AdapterRejected if the file is no blob.
    """
    parts = _parts(blob)
    modules = _lora_modules(parts)
    scalings = {parts.config.scaling(module) for module in modules}
    linears = tuple(sorted({_within_layer(module) for module in modules}))
    return BlobOutline(linears, scalings.pop() if len(scalings) == 1 else None)


def variants(blob: Path, trained_scaling: float | None = None) -> Iterator[Variant]:
    """Yield the variants of an adapter that differ in what a trainer or converter may get wrong:
    scalings, then B transposed, then modules left out.

    trained_scaling: scaling that the trainer states; None if unknown.
    """
    parts = _parts(blob)
    modules = sorted(_lora_modules(parts))
    yield from _scalings(parts.config, modules, trained_scaling)
    if any(_is_square_b(parts, name) for name in parts.modules):
        yield Variant(VariantKind.TRANSPOSED, "with B transposed", parts.config)
    groups: dict[str, set[str]] = {}
    for module in modules:
        linear = _within_layer(module)
        for name in {linear.partition(".")[0], linear}:
            groups.setdefault(name, set()).add(module)
    whole = set(modules)
    left_out: set[frozenset[str]] = {frozenset(whole)}
    for name, members in groups.items():
        if (group := frozenset(members)) not in left_out:
            left_out.add(group)
            config = _without(parts.config, group)
            yield Variant(VariantKind.MODULES, f"without {name}", config, group)


def scaled(blob: Path, factor: float) -> Variant:
    """Return the variant of a stored adapter with the scaling of all modules times a factor."""
    return _scaled(_parts(blob).config, factor)


def write_variant(blob: Path, variant: Variant, out: Path) -> str:
    """Write a variant of a stored adapter to `out`; return the SHA-256 of the written file."""
    header = read_header(blob)
    kept = {
        name: span
        for name, span in header.tensors.items()
        if _module_of(name) not in variant.left_out
    }
    metadata = header.metadata | {METADATA_KEY: variant.config.to_json()}
    places = {name: (span.dtype, span.shape) for name, span in kept.items()}
    digest = hashlib.sha256()
    with blob.open("rb") as source, out.open("wb") as file:
        head = header_bytes(places, metadata)
        file.write(head)
        digest.update(head)
        for name, span in kept.items():
            source.seek(span.begin)
            content = source.read(span.size_bytes)
            if variant.kind is VariantKind.TRANSPOSED and _is_square(name, span):
                content = _turned(content, span)
            file.write(content)
            digest.update(content)
    return digest.hexdigest()


def _parts(blob: Path) -> _Parts:
    header = read_header(blob)
    config = LoraConfig.from_json(header.metadata.get(METADATA_KEY, ""))
    return _Parts(header, config, {name: _module_of(name) for name in header.tensors})


def _lora_modules(parts: _Parts) -> set[str]:
    """Return the modules that have LoRA matrices, named as in blobs (stored adapters)."""
    return {
        module
        for name, module in parts.modules.items()
        if not (token_rows_module(name) or whole_module(name) or head_part(name))
        and split_vector_name(name) is None
    }


def _module_of(name: str) -> str:
    if head_part(name):
        return SCORE.module
    if rows := token_rows_module(name) or whole_module(name):
        return f"{rows} (trained tokens)"
    vector = split_vector_name(name)
    return vector[0] if vector else split_tensor_name(name)[0]


def _within_layer(module: str) -> str:
    """Return a module's name within its decoder layer, or its own if it is outside of layers."""
    name = module.removeprefix("model.layers.")
    return name.lstrip("0123456789").removeprefix(".") if name != module else module


def _scalings(config: LoraConfig, modules: list[str], trained: float | None) -> Iterator[Variant]:
    def scalings(of: LoraConfig) -> tuple[float, ...]:
        return tuple(round(of.scaling(module), 9) for module in modules)

    rule, other = ("α/√r (rsLoRA)", "α/r") if config.use_rslora else ("α/r", "α/√r (rsLoRA)")
    ranks = {module: config.rank(module) for module in modules}
    alphas = {m: config.alpha_pattern.get(m, config.lora_alpha) for m in modules}
    candidates = [
        (f"with the scaling {other} instead of {rule}", _toggled(config)),
        ("with the scaling 1, without α", _with_alphas(config, ranks)),
        (
            "with the scaling α, not divided by the rank",
            _with_alphas(config, {m: alphas[m] * ranks[m] for m in modules}),
        ),
    ]
    own = config.scaling(modules[0]) if modules else 1.0
    if trained is not None and own:
        candidates.insert(0, _named(_scaled(config, trained / own)))
    seen = {scalings(config)}
    for says, variant in candidates:
        if (key := scalings(variant)) not in seen:
            seen.add(key)
            yield Variant(VariantKind.SCALING, says, variant)


def _named(variant: Variant) -> tuple[str, LoraConfig]:
    return variant.says, variant.config


def _toggled(config: LoraConfig) -> LoraConfig:
    return replace(config, use_rslora=not config.use_rslora)


def _with_alphas(config: LoraConfig, alphas: dict[str, float] | dict[str, int]) -> LoraConfig:
    """Return a config with these alphas by module, in which the scaling is alpha / rank."""
    return replace(
        config,
        use_rslora=False,
        alpha_pattern={module: float(alpha) for module, alpha in alphas.items()},
    )


def _scaled(config: LoraConfig, factor: float) -> Variant:
    changed = replace(
        config,
        lora_alpha=config.lora_alpha * factor,
        alpha_pattern={module: a * factor for module, a in config.alpha_pattern.items()},
    )
    return Variant(VariantKind.SCALING, f"scaled by {factor:.3g} times the file's α", changed)


def _without(config: LoraConfig, modules: frozenset[str]) -> LoraConfig:
    return replace(
        config,
        rank_pattern={m: rank for m, rank in config.rank_pattern.items() if m not in modules},
        alpha_pattern={m: alpha for m, alpha in config.alpha_pattern.items() if m not in modules},
    )


def _is_square_b(parts: _Parts, name: str) -> bool:
    return _is_square(name, parts.header.tensors[name])


def _is_square(name: str, span: TensorSpan) -> bool:
    """Whether a tensor is a B whose transpose has the same shape."""
    is_b = ".lora_B." in name or name.endswith(".lora_embedding_B")
    return is_b and len(span.shape) == 2 and span.shape[0] == span.shape[1]


def _turned(content: bytes, span: TensorSpan) -> bytes:
    words = np.frombuffer(content, _WORDS[DTYPE_BYTES[span.dtype]]).reshape(span.shape)
    return words.T.tobytes()
