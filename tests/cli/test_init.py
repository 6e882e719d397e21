"""init makes a catalog and the first admin key."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from typer.testing import CliRunner, Result

from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.cli import app

# A container with a read-only root and no /tmp: only the catalog's own folder can be written.
_READ_ONLY = """
import os, sys

def refuse_writes(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        if not str(arguments[0]).startswith((os.environ["LORIKEET_CATALOG"], os.devnull)):
            raise PermissionError(30, "Read-only file system", arguments[0])

sys.addaudithook(refuse_writes)
from lorikeet.cli import main
main()
"""


def init(folder: Path, *options: str) -> Result:
    environment = {"LORIKEET_CATALOG": str(folder), "LORIKEET_ADMIN_KEY": ""}
    return CliRunner().invoke(app, ["init", *options], env=environment, prog_name="lorikeet")


def test_the_key_it_prints_is_the_catalogs_first_admin_key(tmp_path: Path) -> None:
    said = json.loads(init(tmp_path / "catalog", "--json").stdout)
    state = CatalogReader(LocalStore(tmp_path / "catalog")).refresh()
    key = state.key_by_sha256(sha256(said["key"].encode()).hexdigest())
    assert key is not None
    assert (key.id, key.tenant, key.scopes) == (said["id"], None, frozenset({Scope.ADMIN}))


def test_the_key_stands_alone_on_the_first_line(tmp_path: Path) -> None:
    key, note = init(tmp_path / "catalog").stdout.splitlines()
    assert key.startswith("lk_")
    assert "not shown again" in note


def test_a_catalog_is_not_made_twice(tmp_path: Path) -> None:
    init(tmp_path / "catalog")
    again = init(tmp_path / "catalog")
    assert (again.exit_code, again.stdout) == (3, "")
    assert "there already is a catalog" in again.stderr


def test_if_absent_leaves_an_existing_catalog_alone(tmp_path: Path) -> None:
    assert init(tmp_path / "catalog", "--if-absent").stdout.startswith("lk_")
    store = LocalStore(tmp_path / "catalog")
    before = {key: store.get(key) for key in store.list("")}
    again = init(tmp_path / "catalog", "--if-absent")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")
    assert {key: store.get(key) for key in store.list("")} == before


def test_only_the_catalogs_folder_needs_to_be_writable(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", _READ_ONLY, "init"],
        env=os.environ | {"LORIKEET_CATALOG": str(tmp_path / "catalog")},
        capture_output=True,
        text=True,
    )
    assert said.stdout.startswith("lk_"), said.stderr
