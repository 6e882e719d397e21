"""What every object store does, whichever it is."""

import errno
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.errors import InvalidSetting, ObjectExists, ObjectNotFound, StoreError


def test_an_object_comes_back_as_it_was_written(store: ObjectStore) -> None:
    store.put_if_absent("a/b", b"first")

    assert store.get("a/b") == b"first"
    assert store.size("a/b") == 5


def test_what_is_absent_is_said_to_be(store: ObjectStore, tmp_path: Path) -> None:
    store.put_if_absent("there", b"")

    with pytest.raises(ObjectNotFound, match="absent"):
        store.get("absent")
    with pytest.raises(ObjectNotFound):
        store.size("absent")
    with pytest.raises(ObjectNotFound):
        store.download("absent", tmp_path / "out")
    assert list(store.list("nothing/")) == []


def test_deleting_twice_is_fine(store: ObjectStore) -> None:
    store.put_if_absent("a", b"1")
    store.delete("a")
    store.delete("a")

    assert list(store.list("")) == []


def test_the_time_of_an_object_is_when_it_was_written_or_touched(store: ObjectStore) -> None:
    store.put_if_absent("a", b"1")
    store.put_if_absent("b/c", b"22")
    written = store.modified("a")
    assert abs(written - time.time()) < 30

    time.sleep(1.1)  # S3 counts whole seconds
    store.touch("a")

    assert store.modified("a") > written
    assert store.get("a") == b"1"
    assert [(o.key, o.size_bytes) for o in store.scan("")] == [("a", 1), ("b/c", 2)]
    # a listing of radosgw tells fractions of a second
    assert [int(o.modified) for o in store.scan("a")] == [int(store.modified("a"))]
    for act in (store.modified, store.touch):
        with pytest.raises(ObjectNotFound):
            act("absent")


@pytest.mark.parametrize("size", [0, 1, 40 * 2**20 + 7])
def test_files_travel_whole(store: ObjectStore, tmp_path: Path, size: int) -> None:
    (tmp_path / "in").write_bytes(data := os.urandom(size))

    store.put_if_absent("blobs/x", b"what a file replaces")
    store.put_file("blobs/x", tmp_path / "in")
    digest = store.download("blobs/x", tmp_path / "out")

    assert digest == hashlib.sha256(data).hexdigest()
    assert store.size("blobs/x") == size
    assert (tmp_path / "out").read_bytes() == data


def test_a_download_to_a_full_disk_says_that_it_was_the_disk(
    store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"1" * 100_000)
    store.put_file("blobs/x", tmp_path / "in")

    with pytest.raises(StoreError) as told:
        store.download("blobs/x", Path("/dev/full"))

    cause = told.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC


def test_keys_are_listed_in_byte_order_after_the_start(store: ObjectStore) -> None:
    for key in ("log/2", "log/10", "log/1", "log-old/3", "log/1-x/y", "other"):
        store.put_if_absent(key, b"")

    assert list(store.list("log/")) == ["log/1", "log/1-x/y", "log/10", "log/2"]
    assert list(store.list("log/", "log/1")) == ["log/1-x/y", "log/10", "log/2"]
    assert list(store.list("log/", "log/15")) == ["log/2"]
    assert list(store.list("log/1")) == ["log/1", "log/1-x/y", "log/10"]
    assert store.first("log/", "log/1") == "log/1-x/y"
    assert store.first("log/", "log/2") is None
    assert list(store.list("")) == [
        "log-old/3",
        "log/1",
        "log/1-x/y",
        "log/10",
        "log/2",
        "other",
    ]


def test_a_list_goes_on_over_pages(store: ObjectStore) -> None:
    keys = [f"log/{number:06d}" for number in range(1005)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda key: store.put_if_absent(key, b""), keys))

    assert list(store.list("log/")) == keys


def test_if_absent_keeps_what_was_there(store: ObjectStore) -> None:
    store.put_if_absent("log/1", b"first")

    with pytest.raises(ObjectExists, match="log/1"):
        store.put_if_absent("log/1", b"second")
    assert store.get("log/1") == b"first"


def test_of_many_writers_if_absent_exactly_one_wins(store: ObjectStore) -> None:
    def attempt(writer: int) -> int | None:
        try:
            store.put_if_absent("log/1", str(writer).encode())
        except ObjectExists:
            return None
        return writer

    with ThreadPoolExecutor(16) as writers:
        won = [writer for writer in writers.map(attempt, range(64)) if writer is not None]

    assert len(won) == 1
    assert store.get("log/1") == str(won[0]).encode()


@pytest.mark.parametrize(
    "key", ["../x", "a/../x", "/etc/x", "a//b", ".x", "a/", "", "a\n", "ä", "a\0"]
)
def test_no_key_leaves_the_store(store: ObjectStore, tmp_path: Path, key: str) -> None:
    (tmp_path / "in").write_bytes(b"1")

    for act in (
        lambda: store.get(key),
        lambda: store.size(key),
        lambda: store.put_file(key, tmp_path / "in"),
        lambda: store.put_if_absent(key, b""),
        lambda: store.download(key, tmp_path / "out"),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="cannot be a key"):
            act()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("prefix", ["../", "/etc/", "a/../../", ".unfinished/"])
def test_no_list_leaves_the_store(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(StoreError, match="cannot begin a key"):
        list(store.list(prefix))


def test_a_file_or_folder_that_is_not_there_is_no_missing_object(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.put_if_absent("there", b"1")
    with pytest.raises(StoreError, match="absent-file"):
        store.put_file("a", tmp_path / "absent-file")
    with pytest.raises(StoreError) as told:
        store.download("there", tmp_path / "absent-folder" / "out")
    assert not isinstance(told.value, ObjectNotFound)


@pytest.mark.parametrize("url", ["gs://bucket/x", "http://host/bucket", "s3://", "s3:///x"])
def test_an_unknown_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="s3://bucket/prefix"):
        open_store(url)
