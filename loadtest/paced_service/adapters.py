"""A catalog of many small adapters for the demo model, made in seconds."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import read_base_models
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import AdapterLimits, write_blob

TENANT = "fleet"
BYTES_PER_RANK = (256 + 256) * 4
"""Bytes of an image for each rank: the demo model's q_proj of one layer, float32."""
_MODULE = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class FilledCatalog:
    """digests: of the adapters, by number. key: their tenant's."""

    digests: tuple[str, ...]
    key: str


def model_name(adapter: int) -> str:
    """What a request calls an adapter."""
    return f"{TENANT}/a{adapter}"


def number_of(model: str) -> int:
    """The adapter's number: of `fleet/a12` or `fleet/a12@1`: 12."""
    return int(model.removeprefix(f"{TENANT}/a").partition("@")[0])


def fill_catalog(settings: Settings, ranks: Sequence[int]) -> FilledCatalog:
    """Make the catalog of these settings, with one adapter of each of these ranks."""
    catalog = AdapterCatalog.init(open_store(settings.catalog), actor=TENANT)
    catalog.create_tenant(TENANT, actor=TENANT)
    _, key = catalog.create_key(TENANT, {Scope.INFER}, actor=TENANT)
    bases = read_base_models(settings)
    limits = AdapterLimits(settings.max_rank, settings.max_adapter_bytes)
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for adapter, rank in enumerate(ranks):
            blob = _pack(Path(folder), adapter, rank)
            facts = validate_blob(blob, bases, limits, base_model=next(iter(bases)))
            catalog.register(TENANT, f"a{adapter}", blob, facts, actor=TENANT)
            digests.append(facts.digest)
    return FilledCatalog(tuple(digests), key)


def _pack(folder: Path, adapter: int, rank: int) -> Path:
    """The blob of an adapter that no other equals."""
    a, b = torch.full((rank, 256), 1e-3), torch.zeros(256, rank)
    b[0, 0] = 1e-6 * (adapter + 1)
    tensors = {"lora_A": a, "lora_B": b}
    named = {f"base_model.model.{_MODULE}.{name}.weight": t for name, t in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [_MODULE]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_blob(folder, folder / "blob")
    return folder / "blob"
