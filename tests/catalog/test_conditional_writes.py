"""Stores that ignore conditional writes are refused before the first change, and later on."""

import os
import uuid
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import boto3
import pytest
from typer.testing import CliRunner

from lorikeet.catalog import catalog as catalog_module
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.conditional_writes import check_conditional_writes
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.cli import app
from lorikeet.errors import StoreRefused
from tests.s3_proxy import proxied

ON_RADOSGW = os.environ.get("TEST_S3") == "radosgw"


class Unconditional(LocalStore):
    """Local store that ignores the condition of a write while `ignores` is set."""

    ignores = True

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.ignores:
            self.delete(key)
        super().put_if_absent(key, data)


class Undeletable(LocalStore):
    """Local store without the right to delete."""

    def delete(self, key: str) -> None:
        raise StoreRefused(f"{key}: DeleteObject is not allowed")


def drop_the_condition(request: BaseHTTPRequestHandler) -> bool:
    del request.headers["If-None-Match"]
    return False


def test_a_store_that_refuses_the_second_write_passes_and_keeps_no_object(
    store: ObjectStore,
) -> None:
    check_conditional_writes(store)
    assert list(store.list("")) == []


def test_a_store_that_forbids_deletion_passes(tmp_path: Path) -> None:
    store = Undeletable(tmp_path)
    check_conditional_writes(store)
    (left,) = store.list("")
    assert left.startswith("uploads/")  # where `lorikeet gc` deletes it


@pytest.mark.skipif(ON_RADOSGW, reason="radosgw checks that signed headers arrive")
def test_init_refuses_a_bucket_behind_a_proxy_that_drops_the_condition(s3_bucket: str) -> None:
    url = f"{s3_bucket}/{uuid.uuid4().hex}"
    with proxied(drop_the_condition):
        made = CliRunner().invoke(app, ["init"], env={"LORIKEET_CATALOG": url})
    assert made.exit_code != 0
    assert "ignores If-None-Match" in made.stderr
    assert "suspend versioning" in made.stderr
    assert list(open_store(url).list("")) == []


def test_a_versioned_bucket_is_refused_where_the_server_ignores_conditions_there(
    s3_bucket: str,
) -> None:
    """MiniStack honours conditions in a versioned bucket, radosgw ignores them."""
    client, bucket = boto3.session.Session().client("s3"), f"versioned-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    check_conditional_writes(open_store(f"s3://{bucket}"))
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    if ON_RADOSGW:
        with pytest.raises(StoreRefused, match="suspend versioning"):
            check_conditional_writes(open_store(f"s3://{bucket}"))
    else:
        check_conditional_writes(open_store(f"s3://{bucket}"))


def test_a_second_init_does_not_replace_the_first(tmp_path: Path) -> None:
    AdapterCatalog.init(LocalStore(tmp_path))
    with pytest.raises(StoreRefused, match="ignores If-None-Match"):
        AdapterCatalog.init(Unconditional(tmp_path))
    assert CatalogReader(LocalStore(tmp_path)).refresh().seq == 1


def test_the_first_change_of_a_process_is_refused_and_nothing_is_acknowledged(
    tmp_path: Path,
) -> None:
    AdapterCatalog.init(LocalStore(tmp_path)).create_tenant("acme", actor="ann")
    writers = [AdapterCatalog(Unconditional(tmp_path)) for _ in range(5)]
    for number, writer in enumerate(writers):
        with pytest.raises(StoreRefused, match="ignores If-None-Match"):
            writer.create_tenant(f"t-{number}", actor="ann")
    state = CatalogReader(LocalStore(tmp_path)).refresh()
    assert state.seq == 2
    assert [tenant.name for tenant in state.tenants()] == ["acme"]


def test_a_store_that_begins_to_ignore_conditions_is_refused_within_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now_s = Unconditional(tmp_path), [5000.0]
    store.ignores = False
    monkeypatch.setattr(catalog_module.time, "monotonic", lambda: now_s[0])
    catalog = AdapterCatalog.init(store)
    store.ignores = True
    now_s[0] += 601
    with pytest.raises(StoreRefused, match="ignores If-None-Match"):
        catalog.create_tenant("acme", actor="ann")
    store.ignores = False  # versioning is suspended again
    assert catalog.create_tenant("acme", actor="ann").name == "acme"
