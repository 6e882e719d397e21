"""Failures of a store in a folder."""

from pathlib import Path

import pytest

from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreError


def test_unfinished_writes_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("a/b", b"1")
    (tmp_path / ".unfinished" / "left-by-a-crash").write_bytes(b"half")

    assert list(store.list("")) == ["a/b"]


def test_a_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("a", b"1")
    store.put_if_absent("b", b"2")
    with pytest.raises(StoreError):
        store.put_if_absent("b", b"3")
    store.put_file("c", tmp_path / "a")

    assert list((tmp_path / ".unfinished").iterdir()) == []


def test_reading_creates_no_folder(tmp_path: Path) -> None:
    assert list(LocalStore(tmp_path / "none").list("log/")) == []
    assert not (tmp_path / "none").exists()


def test_a_file_in_the_folders_place_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreError, match="check the folder's owner, mode and space"):
        LocalStore(tmp_path / "file").put_if_absent("a", b"1")
