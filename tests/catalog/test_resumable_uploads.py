"""Resumable uploads in both stores: interrupted ones continue, and no sender is trusted."""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.resumable_uploads import ResumableUploads, Upload
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.errors import Conflict, InvalidAdapter, NotFound, StoreError

PART = 1000
DATA = os.urandom(2 * PART + 17)
DIGEST = hashlib.sha256(DATA).hexdigest()
ANN, BOB = "key-ann", "key-bob"

Send = Callable[..., None]


@pytest.fixture
def uploads(store: ObjectStore) -> ResumableUploads:
    return ResumableUploads(store, part_bytes=PART)


@pytest.fixture
def send(uploads: ResumableUploads, tmp_path: Path) -> Send:
    """send(upload, 2, 3): parts of DATA, to the store's own address if it has one."""

    def run(upload: Upload, *numbers: int, data: bytes = DATA) -> None:
        for number in numbers or upload.numbers:
            piece = data[(number - 1) * PART : number * PART]
            url = uploads.url(upload, number)
            if url is not None:
                httpx.put(url, content=piece).raise_for_status()
            else:
                (tmp_path / "part").write_bytes(piece)
                uploads.put(upload, number, tmp_path / "part")

    return run


def begun(uploads: ResumableUploads, owner: str = ANN) -> Upload:
    return uploads.begin(DIGEST, len(DATA), owner)[0]


def missing(uploads: ResumableUploads, owner: str = ANN) -> tuple[int, ...]:
    return uploads.begin(DIGEST, len(DATA), owner)[1]


def test_parts_in_any_order_become_the_blob(
    uploads: ResumableUploads, send: Send, store: ObjectStore, tmp_path: Path
) -> None:
    upload = begun(uploads)
    send(upload, 3, 1, 2)
    uploads.download(DIGEST, ANN, tmp_path / "out")
    uploads.keep(DIGEST, ANN, tmp_path / "out")
    uploads.discard(upload)

    assert (tmp_path / "out").read_bytes() == DATA
    assert list(store.list("")) == [blob_key(DIGEST)]
    assert store.get(blob_key(DIGEST)) == DATA


def test_an_upload_goes_on_in_another_process(
    uploads: ResumableUploads, send: Send, store_url: str
) -> None:
    send(begun(uploads), 1, 3)

    other = ResumableUploads(open_store(store_url), part_bytes=7 * PART)  # configured anew
    assert other.begin(DIGEST, len(DATA), ANN) == (begun(uploads), (2,))


def test_an_incomplete_upload_cannot_be_downloaded(
    uploads: ResumableUploads, send: Send, tmp_path: Path
) -> None:
    send(begun(uploads), 1, 3)
    with pytest.raises(Conflict, match="1 of 3 parts"):
        uploads.download(DIGEST, ANN, tmp_path / "out")
    assert missing(uploads) == (2,)


def test_a_part_of_another_size_has_not_arrived(
    uploads: ResumableUploads, send: Send, store: ObjectStore, tmp_path: Path
) -> None:
    upload = begun(uploads)
    (tmp_path / "short").write_bytes(b"x")
    store.parts.put(upload.key, upload.token or "", 1, tmp_path / "short")
    send(upload, 2, 3)

    assert missing(uploads) == (1,)
    send(upload, 1)
    assert missing(uploads) == ()


def test_bytes_with_another_digest_are_discarded(
    uploads: ResumableUploads, send: Send, store: ObjectStore, tmp_path: Path
) -> None:
    send(begun(uploads), data=DATA[::-1])
    with pytest.raises(InvalidAdapter, match=f"and not {DIGEST}: register the file again"):
        uploads.download(DIGEST, ANN, tmp_path / "out")

    assert list(store.list("")) == []
    assert missing(uploads) == (1, 2, 3)


def test_no_part_of_a_stored_blob_is_missing(
    uploads: ResumableUploads, store: ObjectStore, tmp_path: Path
) -> None:
    store.put_if_absent(blob_key(DIGEST), DATA)
    assert missing(uploads) == ()
    uploads.download(DIGEST, ANN, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == DATA

    assert [upload.digest for upload in uploads.in_flight()] == [DIGEST]  # collection spares it
    store.delete(blob_key(DIGEST))
    assert missing(uploads) == (1, 2, 3)


def test_an_upload_belongs_to_the_key_that_began_it(
    uploads: ResumableUploads, send: Send, tmp_path: Path
) -> None:
    send(begun(uploads, ANN))
    assert missing(uploads, BOB) == (1, 2, 3)
    with pytest.raises(Conflict, match="3 of 3"):
        uploads.download(DIGEST, BOB, tmp_path / "out")

    uploads.discard(uploads.find(DIGEST, BOB))
    with pytest.raises(NotFound):
        uploads.find(DIGEST, BOB)
    assert missing(uploads, ANN) == ()


def test_an_upload_keeps_its_size(uploads: ResumableUploads) -> None:
    begun(uploads)
    with pytest.raises(Conflict, match=f"{len(DATA)} bytes, and now has 5"):
        uploads.begin(DIGEST, 5, ANN)


def test_a_joined_upload_is_whole_and_takes_no_more_parts(
    uploads: ResumableUploads, send: Send, store: ObjectStore, tmp_path: Path
) -> None:
    upload = begun(uploads)
    send(upload)
    uploads.download(DIGEST, ANN, tmp_path / "out")  # and the gateway was killed right then

    assert missing(uploads) == ()
    uploads.download(DIGEST, ANN, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == DATA


def test_an_address_stops_working_when_its_upload_is_joined(
    uploads: ResumableUploads, send: Send, store: ObjectStore, tmp_path: Path
) -> None:
    upload = begun(uploads)
    url = uploads.url(upload, 1)
    if url is None:
        pytest.skip("a folder has no addresses")
    send(upload)
    uploads.download(DIGEST, ANN, tmp_path / "out")

    assert httpx.put(url, content=b"x" * PART).status_code == 404
    assert store.get(upload.key) == DATA


def test_an_address_accepts_only_the_size_of_its_part(uploads: ResumableUploads) -> None:
    url = uploads.url(begun(uploads), 3)
    if url is None:
        pytest.skip("a folder has no addresses")
    assert httpx.put(url, content=b"x" * 18).status_code == 403
    assert httpx.put(url.replace("partNumber=3", "partNumber=1"), content=b"x" * 17).is_error
    assert httpx.put(url.replace(ANN, BOB), content=b"x" * 17).is_error
    assert httpx.get(url).is_error
    assert httpx.put(url, content=b"x" * 17).is_success


def test_concurrent_begins_leave_one_upload(uploads: ResumableUploads, store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: begun(uploads), range(16)))

    assert len(found) == 1
    assert found == set(uploads.in_flight())
    (upload,) = found
    begun_in_store = list(store.parts.unfinished("uploads/"))
    assert len(begun_in_store) == (0 if uploads.url(upload, 1) is None else 1)


def test_an_abandoned_upload_starts_over(
    uploads: ResumableUploads, send: Send, store: ObjectStore
) -> None:
    upload = begun(uploads)
    send(upload, 1)
    assert upload.token is not None
    store.parts.delete(upload.key, upload.token)  # the collector was killed before the record

    assert missing(uploads) == (1, 2, 3)


def test_a_discarded_upload_takes_no_part(uploads: ResumableUploads, send: Send) -> None:
    upload = begun(uploads)
    if uploads.url(upload, 1) is None:
        pytest.skip("a folder takes it, and the collector takes it away")
    uploads.discard(upload)
    uploads.discard(upload)
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        send(upload, 1)
    assert list(uploads.in_flight()) == []


def test_a_damaged_record_is_named(uploads: ResumableUploads, store: ObjectStore) -> None:
    store.put_if_absent(f"uploads/{DIGEST}/{ANN}/upload.json", b"{}")
    with pytest.raises(StoreError, match=f"uploads/{DIGEST}/{ANN}/upload.json .*: delete it"):
        begun(uploads)


def test_a_large_blob_has_larger_parts_instead_of_more(uploads: ResumableUploads) -> None:
    upload, parts = uploads.begin(DIGEST, 10_000_001, ANN)
    assert len(parts) <= 1000
    assert sum(map(upload.part_size, parts)) == 10_000_001


def test_a_sweep_deletes_abandoned_uploads_and_keeps_younger_uploads(
    uploads: ResumableUploads, send: Send, store: ObjectStore
) -> None:
    send(begun(uploads, ANN), 1)
    crashed = Upload(DIGEST, BOB, len(DATA), PART, 0.0, "nonce", token=None)
    token = store.parts.begin(crashed.key)  # and then the gateway was killed
    send(replace(crashed, token=token), 1)
    assert uploads.sweep(before=time.time() - 60) == 0
    assert missing(uploads, ANN) == (2, 3)

    assert uploads.sweep(before=time.time() + 60) == 1
    assert list(store.list("uploads/")) == []
    assert list(store.parts.unfinished("uploads/")) == []
