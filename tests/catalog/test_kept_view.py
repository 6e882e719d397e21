"""File of the catalog's view on a machine, for starts while the store is away."""

import os
import time
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope
from lorikeet.catalog.state import UnreadPartition
from lorikeet.catalog.store.local import LocalStore


@pytest.fixture
def writer(tmp_path: Path) -> AdapterCatalog:
    catalog = AdapterCatalog.init(LocalStore(tmp_path / "store"))
    for tenant in ("acme", "globex"):
        catalog.create_tenant(tenant, actor="test")
    return catalog


@pytest.fixture
def kept(tmp_path: Path) -> KeptView:
    return KeptView(tmp_path / "cache", "s3://bucket/catalog")


def begun_with(kept: KeptView, tmp_path: Path) -> CatalogReader:
    """Make a reader from the file, which has not asked its store yet."""
    reader, found = CatalogReader(LocalStore(tmp_path / "store")), kept.read()
    assert found is not None
    reader.begin_with(found.state)
    return reader


def test_a_saved_state_equals_the_written_one_and_catches_up_from_there(
    writer: AdapterCatalog, kept: KeptView, tmp_path: Path
) -> None:
    key, _ = writer.create_key("acme", {Scope.INFER}, actor="test")
    writer.revoke_key(key.id, actor="test")
    kept.write(writer.reader.state)
    store = tmp_path / "store"
    store.rename(tmp_path / "away")

    reader = begun_with(kept, tmp_path)
    assert reader.state.seq == writer.reader.state.seq
    assert reader.state.tenants() == writer.reader.state.tenants()
    assert reader.state.key(key.id).revoked

    (tmp_path / "away").rename(store)
    writer.create_tenant("initech", actor="test")
    names = [tenant.name for tenant in reader.refresh().tenants()]
    assert names == ["acme", "globex", "initech"]
    assert reader.snapshot() == writer.reader.state.seq


def test_an_older_state_from_a_slow_gateway_is_not_confirmed(
    writer: AdapterCatalog, kept: KeptView, tmp_path: Path
) -> None:
    older = writer.reader.state
    writer.create_tenant("initech", actor="test")
    kept.write(writer.reader.state)
    assert kept.confirm(writer.reader.state.seq)
    KeptView(tmp_path / "cache", "s3://bucket/catalog").write(older)
    an_hour_ago = time.time() - 3600
    os.utime(kept.path, (an_hour_ago, an_hour_ago))
    assert not kept.confirm(writer.reader.state.seq)
    found = kept.read()
    assert found is not None
    assert found.age_s > 3500


def test_an_unread_partition_is_read_from_the_store_with_its_pending_entries(
    writer: AdapterCatalog, kept: KeptView, tmp_path: Path
) -> None:
    writer.reader.snapshot()
    reader = CatalogReader(writer.store)
    reader.refresh()
    writer.limit_tenant("acme", max_concurrent=7, actor="test")
    state = reader.refresh()
    assert any(isinstance(part, UnreadPartition) and part.pending for part in state.partitions)
    kept.write(state)

    reader = begun_with(kept, tmp_path)
    assert reader.ask(lambda state: state.tenant("acme")).limits.max_concurrent == 7
    assert reader.ask(lambda state: state.tenant("globex")).name == "globex"


def test_the_age_counts_from_the_stores_last_confirmation(
    writer: AdapterCatalog, kept: KeptView, tmp_path: Path
) -> None:
    kept.write(writer.reader.state)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    os.utime(file, (0, time.time() - 100))
    found = kept.read()
    assert found is not None
    assert 100 <= found.age_s < 110
    assert kept.confirm(writer.reader.state.seq)
    found = kept.read()
    assert found is not None
    assert found.age_s < 10


def test_another_catalog_has_another_file(writer: AdapterCatalog, tmp_path: Path) -> None:
    KeptView(tmp_path / "cache", "s3://bucket/one").write(writer.reader.state)
    assert KeptView(tmp_path / "cache", "s3://bucket/two").read() is None


@pytest.mark.parametrize("damage", [b"", b"no zlib", None])
def test_a_damaged_file_is_ignored(
    writer: AdapterCatalog, kept: KeptView, tmp_path: Path, damage: bytes | None
) -> None:
    kept.write(writer.reader.state)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-10] if damage is None else damage)
    assert kept.read() is None
