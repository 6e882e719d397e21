"""Blobs packed while another process writes them: unused until they are verified."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.residency import loader
from lorikeet_engine.residency.disk import incoming_blobs
from tests.engine.blobs import everywhere
from tests.engine.residency.tiers_driver import SIZE, TiersDriver, make
from tests.waiting import eventually

Begin = Callable[..., "Upload"]


class Upload:
    """A blob that a gateway is writing, and of which the tiers know."""

    def __init__(self, bench: TiersDriver, ref: AdapterRef, file: Path, blob: bytes) -> None:
        self.bench, self.ref, self.file, self._blob = bench, ref, file, blob
        file.touch()
        bench.tiers.incoming_blobs.begin(ref.digest, file, len(blob))

    def write(self, until: float = 1.0) -> None:
        """Write the blob up to this share."""
        with self.file.open("ab") as file:
            file.write(self._blob[file.tell() : int(until * len(self._blob))])

    def verify(self) -> None:
        """Move the file into the disk cache, as a replica does with a verified file."""
        os.link(self.file, self.bench.folder / self.ref.digest)

    def has_place(self) -> bool:
        """Whether the blob is being packed, or packed."""
        return self.ref.digest in self.bench.tiers._host.digests()

    def pin(self) -> None:
        self.bench.tiers.pin(self.ref, Residency.HOST, passing=True)
        self.bench.until(lambda: self.bench.tiers.residency(self.ref) >= Residency.HOST)


@pytest.fixture
def begin(shelf, tmp_path) -> Begin:
    numbers = count()

    def begin(bench: TiersDriver, ref: AdapterRef, blob: bytes | None = None) -> Upload:
        file = tmp_path / f"upload-{next(numbers)}"
        return Upload(bench, ref, file, blob or shelf.blob(ref.name).read_bytes())

    return begin


def held(bench: TiersDriver) -> int:
    return bench.tiers.status()[Residency.HOST].adapters


def ended(bench: TiersDriver) -> Callable[[], bool]:
    return lambda: not bench.tiers.incoming_blobs._incoming


@pytest.fixture
def no_packing(monkeypatch) -> None:
    """Make packing by loads fail."""

    def refuse(*_args: object) -> None:
        raise AssertionError("it was packed once more")

    monkeypatch.setattr(loader, "pack", refuse)


def test_a_blob_packed_while_it_came_is_usable_once_verified(shelf, bench, begin, no_packing):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    for share in (0.001, 0.1, 0.5, 0.9, 1.0):
        upload.write(share)
    assert eventually(upload.has_place)
    upload.verify()
    upload.pin()
    assert shelf.fetched == []
    b.lease(a).release()  # which checks every matrix
    assert ended(b)()


def test_an_image_is_unused_until_its_blob_is_verified(shelf, bench, begin):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    upload.write()
    assert eventually(upload.has_place)
    assert b.tiers.residency(a) is Residency.REMOTE
    assert not b.tiers._host.holds(a.digest)
    assert b.tiers._host.hold(a.digest) is None
    upload.verify()
    upload.pin()


def test_a_refused_blob_leaves_nothing(shelf, bench, begin):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    upload.write()
    assert eventually(upload.has_place)
    upload.file.unlink()
    assert eventually(lambda: held(b) == 0)
    assert eventually(ended(b))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_a_truncated_blob_leaves_nothing(shelf, bench, begin, share):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    upload.write(share)
    upload.file.unlink()
    assert eventually(ended(b))
    assert held(b) == 0
    b.lease(a).release()


def test_a_blob_whose_gateway_was_killed_is_dropped_in_time(shelf, bench, begin, monkeypatch):
    monkeypatch.setattr(incoming_blobs, "LONGEST_S", 0.1)
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    upload.write()
    assert eventually(ended(b))
    assert held(b) == 0
    upload.verify()
    upload.pin()  # it is packed now


def test_the_image_of_another_file_that_claims_the_digest_is_not_taken(shelf, bench, begin):
    a, c = make(shelf, "ac")
    b = bench()
    wrong = begin(b, a, shelf.blob(c.name).read_bytes())
    wrong.write()
    assert eventually(wrong.has_place)
    right = begin(b, a)  # not begun: the digest is being packed
    right.write()
    right.verify()
    right.pin()
    b.lease(a).release()
    assert ended(b)()


def test_bytes_that_are_no_adapter_leave_nothing_and_their_load_reports_why(shelf, bench, begin):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a, b"\xff" * 5000)
    upload.write()
    assert eventually(ended(b))
    assert held(b) == 0
    b.lease(a).release()


def test_an_adapter_that_is_too_large_takes_no_memory(shelf, bench, begin):
    large = shelf.make("large", everywhere(16))
    b = bench(gpu=2, host=8)
    upload = begin(b, large)
    upload.write()
    assert eventually(ended(b))
    assert held(b) == 0


def test_requests_take_the_memory_of_unverified_images(shelf, bench, begin):
    a, c = make(shelf, "ac")
    b = bench(host=1)
    upload = begin(b, a)
    upload.write()
    assert eventually(upload.has_place)
    b.lease(c).release()
    assert eventually(ended(b))
    upload.verify()
    upload.pin()


def test_pinned_images_are_not_evicted_for_incoming_blobs(shelf, bench, begin):
    a, c = make(shelf, "ac")
    b = bench(host=1)
    b.tiers.pin(c, Residency.HOST)
    b.until(lambda: b.tiers._host.holds(c.digest))
    upload = begin(b, a)
    upload.write()
    assert eventually(ended(b))
    assert b.tiers._host.digests() == [c.digest]


def test_at_most_two_blobs_are_packed_at_once(shelf, bench, begin):
    refs, b = make(shelf, "acd"), bench()
    uploads = [begin(b, ref) for ref in refs]
    assert len(b.tiers.incoming_blobs._incoming) == incoming_blobs.MAX_CONCURRENT
    for upload in uploads:
        upload.write()
        upload.verify()
        upload.pin()
    for ref in refs:
        b.lease(ref).release()


def test_closing_ends_packing(shelf, bench, begin):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    upload.write(0.5)
    b.tiers.close()
    assert ended(b)()
    assert held(b) == 0
    begin(b, a)
    assert ended(b)()


def test_an_adapter_on_the_host_already_is_not_packed(shelf, bench, begin):
    (a,), b = make(shelf, "a"), bench()
    b.load(a, to=Residency.HOST)
    upload = begin(b, a)
    upload.write()
    assert eventually(ended(b))
    assert b.tiers.residency(a) >= Residency.HOST


def test_the_image_of_a_lasting_adapter_is_written_to_the_disk(shelf, bench, begin, no_packing):
    (a,), b = make(shelf, "a"), bench()
    upload = begin(b, a)
    upload.write()
    assert eventually(upload.has_place)
    upload.verify()
    b.tiers.pin(a, Residency.HOST)
    b.until(lambda: b.tiers.residency(a) >= Residency.HOST)
    assert b.image(a).exists()
    b.until(lambda: b.tiers.adapters()[0].image_bytes == SIZE * 4)


def test_a_used_image_is_evicted_like_any_other(shelf, bench, begin):
    a, c = make(shelf, "ac")
    b = bench(host=1)
    upload = begin(b, a)
    upload.write()
    upload.verify()
    assert eventually(upload.has_place)
    upload.pin()
    b.tiers.unpin(a.digest)
    b.lease(c).release()
    assert b.tiers._host.digests() == [c.digest]
