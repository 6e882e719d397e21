"""Behaviour that both object stores share."""

import errno
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.catalog.store.s3 import S3Store
from lorikeet.errors import InvalidSetting, ObjectExists, ObjectNotFound, StoreError


def test_an_object_is_read_as_written(store: ObjectStore) -> None:
    store.put_if_absent("a/b", b"first")

    assert store.get("a/b") == b"first"
    assert store.size("a/b") == 5


def test_reading_an_absent_object_raises_object_not_found(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.put_if_absent("there", b"")

    with pytest.raises(ObjectNotFound, match="absent"):
        store.get("absent")
    with pytest.raises(ObjectNotFound):
        store.size("absent")
    with pytest.raises(ObjectNotFound):
        store.download("absent", tmp_path / "out")
    assert list(store.list("nothing/")) == []


def test_deleting_twice_raises_nothing(store: ObjectStore) -> None:
    store.put_if_absent("a", b"1")
    store.delete("a")
    store.delete("a")

    assert list(store.list("")) == []


def test_an_objects_time_is_the_time_of_its_last_write_or_touch(store: ObjectStore) -> None:
    store.put_if_absent("a", b"1")
    store.put_if_absent("b/c", b"22")
    written = store.modified("a")
    assert abs(written - time.time()) < 30

    time.sleep(1.1)  # S3 has whole seconds
    store.touch("a")

    assert store.modified("a") > written
    assert store.get("a") == b"1"
    assert [(o.key, o.size_bytes) for o in store.scan("")] == [("a", 1), ("b/c", 2)]
    # radosgw's listing has fractions of a second
    assert [int(o.modified) for o in store.scan("a")] == [int(store.modified("a"))]
    for act in (store.modified, store.touch):
        with pytest.raises(ObjectNotFound):
            act("absent")


@pytest.mark.parametrize("size", [0, 1, 40 * 2**20 + 7])
def test_a_file_is_downloaded_as_uploaded(store: ObjectStore, tmp_path: Path, size: int) -> None:
    (tmp_path / "in").write_bytes(data := os.urandom(size))

    store.put_if_absent("blobs/x", b"replaced by the file")
    store.put_file("blobs/x", tmp_path / "in")
    digest = store.download("blobs/x", tmp_path / "out")

    assert digest == hashlib.sha256(data).hexdigest()
    assert store.size("blobs/x") == size
    assert (tmp_path / "out").read_bytes() == data


def test_a_download_to_a_full_disk_raises_the_disks_error(
    store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"1" * 100_000)
    store.put_file("blobs/x", tmp_path / "in")

    with pytest.raises(StoreError) as told:
        store.download("blobs/x", Path("/dev/full"))

    cause = told.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC


def test_keys_are_listed_in_byte_order_after_start_after(store: ObjectStore) -> None:
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


def test_a_listing_spans_pages(store: ObjectStore) -> None:
    if isinstance(store, S3Store):  # otherwise a page has a thousand keys

        def few(params: dict[str, Any], **_: Any) -> dict[str, Any]:
            return params | {"MaxKeys": 10}

        store._client.meta.events.register("provide-client-params.s3.ListObjectsV2", few)
    keys = [f"log/{number:06d}" for number in range(25)]
    for key in keys:
        store.put_if_absent(key, b"")

    assert list(store.list("log/")) == keys


def test_put_if_absent_replaces_nothing(store: ObjectStore) -> None:
    store.put_if_absent("log/1", b"first")

    with pytest.raises(ObjectExists, match="log/1"):
        store.put_if_absent("log/1", b"second")
    assert store.get("log/1") == b"first"


def test_put_if_absent_succeeds_for_exactly_one_of_many_writers(store: ObjectStore) -> None:
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
def test_a_key_outside_the_store_is_refused(store: ObjectStore, tmp_path: Path, key: str) -> None:
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
def test_a_listing_outside_the_store_is_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(StoreError, match="cannot begin a key"):
        list(store.list(prefix))


def test_a_missing_local_file_or_folder_does_not_raise_object_not_found(
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
