"""A writer that crashes at any point leaves a catalog that can be read and changed."""

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from tests.catalog.crashing_store import Crash, Mortal

WRITER = Path(__file__).with_name("one_writer.py")


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


def test_killed_writers_lose_nothing(
    catalog: AdapterCatalog, store_url: str, store: ObjectStore, tmp_path: Path
) -> None:
    chance = random.Random(7)
    promised: set[tuple[int, str]] = set()
    for round_number in range(5):
        writer = subprocess.Popen(
            [sys.executable, str(WRITER), store_url, f"w{round_number}", "100000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        lines = [writer.stdout.readline() for _ in range(chance.randrange(6))]
        time.sleep(chance.uniform(0.0, 0.02))
        writer.kill()
        lines += writer.communicate()[0].splitlines(keepends=True)
        promised |= {
            (int(number), digest)
            for number, digest in (line.split() for line in lines if line.endswith("\n"))
        }
        check(store, promised)

    assert promised

    check(store, promised | {register(store, tmp_path, b"after the crashes")})
