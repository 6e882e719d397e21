"""A writer that crashes at any point leaves a catalog that can be read and changed."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from tests.catalog.crashing_store import Crash, Mortal


def check(store: ObjectStore, at_least: set[tuple[int, str]]) -> None:
    """Check that every acknowledged version is registered and every version has its blob."""
    catalog = CatalogReader(store)
    record = list(catalog.refresh().adapters("acme"))
    versions = record[0].versions if record else ()
    assert at_least <= {(version.version, version.digest) for version in versions}
    for version in versions:
        data = store.get(blob_key(version.digest))
        assert hashlib.sha256(data).hexdigest() == version.digest
    if record:
        assert record[0].aliases["prod"] == len(versions)


def register(store: ObjectStore, folder: Path, data: bytes) -> tuple[int, str]:
    (folder / "blob").write_bytes(data)
    facts = BlobFacts(hashlib.sha256(data).hexdigest(), len(data), 8, "demo", 10)
    version = AdapterCatalog(store).register(
        "acme", "support", folder / "blob", facts, promote=True, actor="ann"
    )
    return version.version, version.digest


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_between_any_two_steps_loses_nothing(tmp_path: Path, after: bool) -> None:
    crashes = 0
    survived = False
    while not survived:
        store = LocalStore(tmp_path / f"store-{crashes}")
        AdapterCatalog.init(store).create_tenant("acme", actor="ann")
        promised = {register(store, tmp_path, b"first")}
        mortal: Any = Mortal(store, crashes + 1, after=after)
        try:
            promised.add(register(mortal, tmp_path, b"second"))
            survived = True
        except Crash:
            crashes += 1
        check(store, promised)
        promised.add(register(store, tmp_path, b"third"))
        check(store, promised)

    assert crashes >= 7  # what there is to read, the blob, the commit
