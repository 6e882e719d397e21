"""Both stores, an adapter's blob, and a catalog with one tenant."""

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.config import Config

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts, VersionRecord
from lorikeet.catalog.store import s3
from lorikeet.catalog.store.object_store import ObjectStore, open_store

Register = Callable[..., VersionRecord]


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}"


@pytest.fixture
def store(store_url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    # under load the server may need longer for 40 MiB than the product's timeout
    monkeypatch.setattr(s3, "_LONG_TIMEOUT", Config(read_timeout=60))
    return open_store(store_url)


@pytest.fixture
def clock() -> list[float]:
    """clock[0] is the time in every catalog of the test, Unix seconds."""
    return [1000.0]


@pytest.fixture
def catalog(store: ObjectStore, clock: list[float]) -> AdapterCatalog:
    made = AdapterCatalog.init(store, clock=lambda: clock[0])
    made.create_tenant("acme", actor="ann")
    return made


@pytest.fixture
def register(catalog: AdapterCatalog, tmp_path: Path) -> Register:
    """register("acme/support", b"blob", promote=True) with facts that fit the bytes."""

    def run(label: str, data: bytes, **options: object) -> VersionRecord:
        tenant, _, name = label.partition("/")
        blob = tmp_path / uuid.uuid4().hex
        blob.write_bytes(data)
        facts = BlobFacts(
            digest=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            max_rank=8,
            base_model="demo",
            gpu_bytes=len(data),
            head=options.pop("head", None),  # type: ignore[arg-type]
        )
        given = {"actor": "ann"} | options
        return catalog.register(tenant, name, blob, facts, **given)  # type: ignore[arg-type]

    return run
