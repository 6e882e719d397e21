"""One service for all tests of a model: at most two replicas, of one or two GPUs each."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loadtest.real_service.adapters import AdapterWeights, save_adapter
from loadtest.real_service.random_models import LINEARS, SHAPES, write_model
from loadtest.real_service.service import service
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.object_store import open_store
from lorikeet_engine.adapter_format import BaseShape
from tests.gpu.fleet import TENANT, Fleet

GPUS = torch.cuda.device_count()
ADAPTERS = {  # rank and linears; the largest adapters of large models change attention only
    "qwen3-0.6b": {8: LINEARS, 16: LINEARS, 32: LINEARS, 64: LINEARS},
    "llama-3.1-8b": {8: LINEARS, 16: LINEARS, 32: LINEARS[:4], 64: LINEARS[:4]},
    "tiny": {8: LINEARS, 16: LINEARS, 32: LINEARS, 64: LINEARS[:2]},
}
ON_ONE = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
ON_TWO = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
SERVED = [  # model shape, and the GPUs of each replica (on a CPU, its processes)
    pytest.param(("tiny", 1), id="tiny", marks=pytest.mark.soak),
    pytest.param(("tiny", 2), id="tiny-tp2", marks=pytest.mark.soak),
    pytest.param(("qwen3-0.6b", 1), id="qwen3-0.6b", marks=[pytest.mark.gpu, ON_ONE]),
    pytest.param(("qwen3-0.6b", 2), id="qwen3-0.6b-tp2", marks=[pytest.mark.gpu, ON_TWO]),
    pytest.param(("llama-3.1-8b", 1), id="llama-3.1-8b", marks=[pytest.mark.gpu, ON_ONE]),
    pytest.param(("llama-3.1-8b", 2), id="llama-3.1-8b-tp2", marks=[pytest.mark.gpu, ON_TWO]),
]


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def shape(served: tuple[str, int]) -> str:
    return served[0]


@pytest.fixture(scope="module")
def tensor_parallel(served: tuple[str, int]) -> int:
    return served[1]


@pytest.fixture(scope="module")
def device(shape: str) -> str:
    return "cpu" if shape == "tiny" else "cuda"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of models; TEST_MODELS, if set, keeps them for the next run, as writing is slow."""
    kept = os.environ.get("TEST_MODELS")
    return Path(kept) if kept else tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def adapters(shape: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT folders by adapter name."""
    root, base = tmp_path_factory.mktemp("adapters"), BaseShape.from_config(SHAPES[shape])
    return {
        f"r{rank}": save_adapter(root / f"r{rank}", base, rank, 2 * rank, AdapterWeights(linears))
        for rank, linears in ADAPTERS[shape].items()
    }


@pytest.fixture(scope="module")
def fleet(
    shape: str,
    tensor_parallel: int,
    device: str,
    folder: Path,
    s3_bucket: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    model = write_model(folder, shape, device)
    count = min(2, (GPUS if device == "cuda" else 2) // tensor_parallel)
    catalog = f"{s3_bucket}/{shape}-{tensor_parallel}"
    store = AdapterCatalog.init(open_store(catalog))
    store.create_tenant(TENANT, actor="test")
    _, key = store.create_key(TENANT, {Scope.INFER}, actor="test")
    _, admin_key = store.create_key(None, {Scope.ADMIN}, actor="test")
    sizes = ("4GiB", "2GiB", "2GiB") if device == "cuda" else ("64MiB", "2MiB", "4MiB")
    memory = dict(zip(("KV_CACHE", "ADAPTER_GPU", "ADAPTER_HOST"), sizes, strict=True))
    variables = {
        "LORIKEET_BASE_MODELS": f"{shape}={model}",
        "LORIKEET_CATALOG": catalog,
        "LORIKEET_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "LORIKEET_DEVICE": device,
        "LORIKEET_REPLICAS": str(count),
        "LORIKEET_TENSOR_PARALLEL": f"{shape}={tensor_parallel}",
        "LORIKEET_GATEWAYS": "2",
        "LORIKEET_MAX_CONTEXT": "2048",
        **{f"LORIKEET_{name}_MEMORY": size for name, size in memory.items()},
    }
    if device == "cpu":
        variables |= {"LORIKEET_MAX_BATCH_TOKENS": "256", "OMP_NUM_THREADS": "1"}
    with service(variables, "Serve's proxy") as running:
        yield Fleet(running, shape, model, count, tensor_parallel, admin_key, key)
