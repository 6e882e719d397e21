"""lorikeet gc lists unneeded objects, and deletes them unless --dry-run is given."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store.local import LocalStore
from lorikeet.cli import app

KEY = "blobs/00/" + "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    AdapterCatalog.init(store)
    return store


@pytest.fixture
def garbage(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"b" * 2048)
    store.put_file(KEY, tmp_path / "blob")
    os.utime(Path(store.url) / KEY, (time.time() - 3 * 86400,) * 2)


def run(store: LocalStore, *arguments: str) -> Result:
    environment = {"LORIKEET_CATALOG": store.url, "COLUMNS": "120"}
    return CliRunner().invoke(app, ["gc", *arguments], env=environment)


@pytest.mark.usefixtures("garbage")
def test_a_dry_run_lists_garbage_and_deletes_nothing(store: LocalStore) -> None:
    result = run(store, "--grace-days", "2", "--dry-run")

    assert result.exit_code == 0
    assert KEY in result.stdout
    assert "1 would be deleted, 2.0 KiB in all." in result.stdout
    assert store.size(KEY) == 2048


@pytest.mark.usefixtures("garbage")
def test_garbage_beyond_the_grace_period_is_deleted(store: LocalStore) -> None:
    assert run(store).stdout == "There is no garbage.\n"

    told = json.loads(run(store, "--grace-days", "2", "--json").stdout)

    assert told["deleted"] is True
    assert told["size_bytes"] == 2048
    assert [one["key"] for one in told["objects"]] == [KEY]
    assert list(store.list("blobs/")) == []


def test_expired_responses_are_deleted_if_their_lifetime_is_set(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"responses/acme/resp_{'0' * 32}"
    store.put_if_absent(key, b"{}")
    os.utime(Path(store.url) / key, (time.time() - 3 * 3600,) * 2)
    assert run(store).stdout == "There is no garbage.\n"
    monkeypatch.setenv("LORIKEET_RESPONSES_LIFETIME_H", "4")
    assert run(store).stdout == "There is no garbage.\n"
    monkeypatch.setenv("LORIKEET_RESPONSES_LIFETIME_H", "3")
    assert "1 deleted" in run(store).stdout
    assert list(store.list("responses/")) == []


def test_a_short_grace_period_and_no_catalog_are_refused(store: LocalStore, tmp_path: Path) -> None:
    assert run(store, "--grace-days", "0.5").exit_code == 2
    nowhere = run(LocalStore(tmp_path / "nowhere"))
    assert nowhere.exit_code == 1
    assert "run `lorikeet init` first" in nowhere.stderr
