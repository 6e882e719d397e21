"""Failures of a store in a folder."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
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


def test_deleting_the_last_object_of_a_folder_removes_the_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("top", "uploads/a/key-1/record", "uploads/a/key-1/parts/00001", "uploads/b"):
        store.put_if_absent(key, b"1")
    store.delete("uploads/a/key-1/parts/00001")
    assert [path.name for path in (tmp_path / "uploads/a/key-1").iterdir()] == ["record"]
    store.delete("uploads/a/key-1/record")
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == ["b"]
    store.delete("uploads/b")
    store.delete("top")
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished"]


@pytest.mark.parametrize("put", ["put_if_absent", "put_file"])
def test_no_write_fails_because_others_remove_its_empty_folder(tmp_path: Path, put: str) -> None:
    stores = [LocalStore(tmp_path / "store") for _ in range(4)]
    (tmp_path / "source").write_bytes(b"1")
    given = b"1" if put == "put_if_absent" else tmp_path / "source"

    def write_and_delete(number: int) -> None:
        key = f"uploads/a/key-1/{number}"
        for _ in range(100):
            getattr(stores[number], put)(key, given)
            assert stores[number].get(key) == b"1"
            stores[number].delete(key)

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(write_and_delete, range(len(stores))))
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".unfinished"]


@pytest.mark.parametrize("put", ["put_if_absent", "put_file"])
def test_a_folder_that_others_created_and_removed_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    store, folder, mkdir = LocalStore(tmp_path / "store"), tmp_path / "store" / "uploads", os.mkdir
    (tmp_path / "source").write_bytes(b"1")
    others = [folder]  # exists when this store creates it, and no more afterwards

    def mkdir_too_late(path: Path, mode: int = 0o777) -> None:
        if path in others:
            others.remove(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir_too_late)
    getattr(store, put)("uploads/a/1", b"1" if put == "put_if_absent" else tmp_path / "source")

    assert not others
    assert store.get("uploads/a/1") == b"1"


def test_a_file_in_the_folders_place_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreError, match="check the folder's owner, mode and space"):
        LocalStore(tmp_path / "file").put_if_absent("a", b"1")
