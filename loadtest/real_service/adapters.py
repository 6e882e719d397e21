"""Random adapters in a service's catalog, packed and validated as users' adapters are.

Adapters of one rank share their matrices and differ in alpha: each is a blob with a digest of its
own, as different to an engine as any two adapters, and a thousand are made in seconds.
"""

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadtest.real_service.random_models import LINEARS, SHAPES
from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.records import BlobFacts, Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import read_base_models
from lorikeet.replica.engine_settings import adapter_memory
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterLimits,
    BaseShape,
    write_blob,
)

TENANT = "bench"
_AT_ONCE = 16
_DELTA = 0.1  # of a linear's output, by root mean square


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Weights that adapters hold.

    linears: names of the adapted linears.
    layers: number of adapted layers, from the first; None: all.
    """

    linears: Sequence[str] = LINEARS
    layers: int | None = None


EVERY_LINEAR = AdapterWeights()


@dataclass(frozen=True, slots=True)
class FilledCatalog:
    """Adapters and keys of a filled catalog.

    refs: adapters, by number.
    key: API key of the adapters' tenant.
    admin_key: API key of an administrator.
    """

    refs: tuple[AdapterRef, ...]
    key: str
    admin_key: str


def model_name(adapter: int) -> str:
    """Return the model name of an adapter in requests."""
    return f"{TENANT}/a{adapter}"


def fill_catalog(
    settings: Settings, ranks: Sequence[int], weights: AdapterWeights = EVERY_LINEAR
) -> FilledCatalog:
    """Create the catalog of these settings, with one adapter for each rank.

    The settings name one base model, that of all adapters. On a local store blobs are written
    straight to their final paths; each takes rank × sum of the base's widths × 2 bytes.
    weights: linears and layers that each adapter changes.
    """
    store = open_store(settings.catalog)
    catalog = AdapterCatalog.init(store, actor=TENANT)
    catalog.create_tenant(TENANT, actor=TENANT)
    _, key = catalog.create_key(TENANT, {Scope.INFER}, actor=TENANT)
    _, admin_key = catalog.create_key(None, {Scope.ADMIN}, actor=TENANT)
    local = isinstance(store, LocalStore)
    refs = []
    with (
        tempfile.TemporaryDirectory(dir=store.url if local else None) as name,
        ThreadPoolExecutor(_AT_ONCE) as threads,
    ):
        folder = Path(name)
        (base,) = read_base_models(settings).values()
        for rank in set(ranks):
            _save_matrices(folder / str(rank), base.shape, rank, weights)
        pack = partial(_pack, folder, settings, weights)
        for adapter, (blob, facts) in enumerate(threads.map(pack, range(len(ranks)), ranks)):
            if local:
                place = Path(store.url, blob_key(facts.digest))
                place.parent.mkdir(parents=True, exist_ok=True)
                blob = blob.rename(place)
            catalog.register(TENANT, f"a{adapter}", blob, facts, actor=TENANT)
            refs.append(AdapterRef(TENANT, f"a{adapter}", 1, facts.digest))
    return FilledCatalog(tuple(refs), key, admin_key)


def save_adapter(
    folder: Path,
    shape: BaseShape,
    rank: int,
    alpha: float,
    weights: AdapterWeights = EVERY_LINEAR,
) -> Path:
    """Write an adapter's folder as PEFT's save_pretrained does; return the folder.

    shape: shapes of the base model.
    weights: linears and layers that the adapter changes.
    """
    _save_matrices(folder, shape, rank, weights)
    _save_config(folder, rank, alpha, weights)
    return folder


def image_bytes(shape: str, rank: int, device: str, linears: Sequence[str] = LINEARS) -> int:
    """Return an adapter's bytes on the device, without the padding of its matrices.

    shape: a name in SHAPES.
    device: cpu or cuda, which decides the dtype.
    linears: names of the adapted linears.
    """
    base = BaseShape.from_config(SHAPES[shape])
    widths = sum(sum(base.dims(base.index(linear))) for linear in linears)
    return base.layers * widths * rank * (2 if device == "cuda" else 4)


def _save_matrices(folder: Path, shape: BaseShape, rank: int, weights: AdapterWeights) -> None:
    """Write the matrices of an adapter without its config; equal arguments give equal matrices."""
    random = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(weights.layers or shape.layers):
        for linear in weights.linears:
            index = shape.index(linear)
            d_in, d_out = shape.dims(index)
            path = f"base_model.model.{shape.linears[index].path(layer)}"
            a = torch.randn(rank, d_in, generator=random) * d_in**-0.5
            b = torch.randn(d_out, rank, generator=random) * (_DELTA * rank**-0.5)
            tensors[f"{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"{path}.lora_B.weight"] = b.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)


def _pack(
    folder: Path, settings: Settings, weights: AdapterWeights, adapter: int, rank: int
) -> tuple[Path, BlobFacts]:
    """Pack one adapter; return its blob, and the facts about it that validation finds.

    folder: contains, for each rank, a folder named after the rank with the matrices of that rank.
    adapter: number of the adapter, which decides its alpha.
    """
    own = folder / f"a{adapter}"
    own.mkdir()
    (own / WEIGHTS_FILE).hardlink_to(folder / str(rank) / WEIGHTS_FILE)
    _save_config(own, rank, rank * (1 + adapter / 4096), weights)
    blob = folder / f"a{adapter}.blob"
    write_blob(own, blob)
    bases = read_base_models(settings)
    limits = AdapterLimits(settings.max_rank, settings.max_adapter_bytes, settings.max_added_tokens)
    return blob, validate_blob(blob, bases, limits, next(iter(bases)), adapter_memory(settings))


def _save_config(folder: Path, rank: int, alpha: float, weights: AdapterWeights) -> None:
    layers = None if weights.layers is None else list(range(weights.layers))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(weights.linears),
        "layers_to_transform": layers,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
