"""Validation of uploaded adapter files (blobs), and detection of their base model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lorikeet.catalog.records import BlobFacts
from lorikeet.errors import InvalidAdapter, InvalidInput
from lorikeet.gateway.services import ServedModel
from lorikeet_engine.adapter_format import (
    FLOAT32_MEMORY,
    AdapterLimits,
    AdapterMemory,
    ValueScan,
    blob_digest,
    check_values,
    last_part,
    read_spec,
    same_model,
    trained_on,
)
from lorikeet_engine.errors import AdapterError, SettingsError
from lorikeet_engine.parallel.shard import Shard

MAX_RANK = "LORIKEET_MAX_RANK, or the tenant's own: `lorikeet tenants limit --rank`"
MAX_BYTES = (
    "LORIKEET_MAX_ADAPTER_BYTES, or the tenant's own: `lorikeet tenants limit --adapter-bytes`"
)
"""Settings that limit an adapter's size, quoted in the error for a larger adapter."""
_MEMORY = "LORIKEET_ADAPTER_GPU_MEMORY, LORIKEET_ADAPTER_HOST_MEMORY"


def validate_blob(
    blob: Path,
    base_models: Mapping[str, ServedModel],
    limits: AdapterLimits,
    base_model: str | None = None,
    memory: AdapterMemory = FLOAT32_MEMORY,
    digest: str | None = None,
    scan: ValueScan | None = None,
    shrinks: bool = False,
) -> BlobFacts:
    """Check a blob (adapter's file) for all that could make the adapter fail on a replica.

    Returns facts about the blob.

    Blocks: call it in a thread.

    blob: file with the blob.
    base_models: served base models by name.
    limits: limits on the adapter's rank and size, the stricter of the service's and the tenant's.
    base_model: base model that the admin names; None: the one that the blob names.
    memory: GPU and host memory for adapters in the engines, which the adapter has to fit.
    digest: SHA-256 of the blob, if computed during the upload; None: compute it.
    scan: scan of the tensors' values made during the upload; None: read the whole blob.
    shrinks: whether rows of whole modules may still be removed; a blob that has such modules then
        need not fit the memory yet.

    Raises InvalidAdapter, which names the tensor, module or config key at fault.
    """
    try:
        name = (
            check_base_model(base_model, base_models)
            if base_model
            else _matching(blob, base_models)
        )
        shape, gpus = base_models[name].shape, memory.gpus.get(name, 1)
        spec = read_spec(blob, shape, limits)
        kept = Shard(0, gpus).ranges(shape)
        if shrinks and any(isinstance(part.ids, range) for part in spec.token_rows):
            memory = replace(memory, gpu_bytes=None, host_bytes=None)
        gpu_bytes = memory.image_bytes(spec.packed_elements(lambda n: kept[n].dims), gpus)
        check_values(blob, spec, memory.dtype, scan)
    except (AdapterError, SettingsError) as error:
        raise _invalid(error) from error
    return BlobFacts(
        digest=digest or blob_digest(blob),
        size_bytes=spec.size_bytes,
        max_rank=spec.max_rank,
        base_model=name,
        gpu_bytes=gpu_bytes,
        touches=spec.touches,
        trained_on=spec.base_model,
        invocation_tokens=spec.invocation_tokens,
        head=None if spec.head is None else spec.head.head,
        embedder=spec.embedder,
        vocabulary=spec.vocabulary,
    )


def _invalid(error: AdapterError | SettingsError) -> InvalidAdapter:
    limits = {"max_rank": MAX_RANK, "size_bytes": MAX_BYTES, "gpu_bytes": _MEMORY}
    if (rank := error.fields.get("rank")) is not None:
        limits["max_rank"] = f"{MAX_RANK}; {rank} admits it"
    set_by = "".join(f" ({limits[field]})" for field in error.fields.keys() & limits)
    return InvalidAdapter(error.message + set_by, param=error.fields.get("field"))


def check_base_model(base_model: str, base_models: Mapping[str, ServedModel]) -> str:
    """Return `base_model`. Raises InvalidInput if this service does not serve it."""
    if base_model not in base_models:
        raise InvalidInput(
            f"base_model={base_model!r} is not served here: {_list(base_models)}",
            param="base_model",
        )
    return base_model


def matching_names(declared: str, base_models: Mapping[str, ServedModel]) -> list[str]:
    """Return the names of the served base models that may be the one an adapter was trained on.

    Names and aliases are compared without owner or folder. If no served name equals the declared
    one, a model also matches if one of the two is a quantized copy of the other.

    declared: name that the adapter's files give its base model.
    """
    names = {name: (name, *base.aliases) for name, base in base_models.items()}
    found = [n for n, known in names.items() if last_part(declared) in map(last_part, known)]
    return found or [n for n, known in names.items() if any(same_model(declared, k) for k in known)]


def declared_base_model(blob: Path) -> str:
    """Return the name that a blob gives its base model; empty: none.

    Raises InvalidAdapter if the file is no blob.
    """
    declared = trained_on(blob)
    if declared is None:
        raise InvalidAdapter("not a packed adapter: `lorikeet register` packs PEFT's folder")
    return declared


def _matching(blob: Path, base_models: Mapping[str, ServedModel]) -> str:
    """Return the name of the served base model that a blob says it was trained on.

    Raises InvalidAdapter unless exactly one served base model matches.
    """
    declared = declared_base_model(blob)
    found = matching_names(declared, base_models)
    if len(found) != 1:
        says = f"says that it was trained on {declared!r}" if declared else "names no base model"
        raise InvalidAdapter(
            f"the adapter {says}; served here: {_list(base_models)}. If it is for one of these, "
            "say which: --base-model NAME, or ?base_model=NAME in the address",
            param="base_model",
        )
    return found[0]


def _list(base_models: Mapping[str, ServedModel]) -> str:
    return ", ".join(sorted(base_models))
