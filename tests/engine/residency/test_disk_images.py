"""Packed images on the disk: read instead of packed again, and replaced when damaged."""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lorikeet_engine.adapter import Residency
from lorikeet_engine.adapter_format import read_spec
from lorikeet_engine.errors import AdapterTooLarge
from lorikeet_engine.residency import blob_packing, loader
from lorikeet_engine.residency.disk import image_file
from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.disk.image_file import ImageFile
from tests.engine.residency.tiers_driver import LIMITS, make


def test_the_second_load_reads_the_image_and_needs_no_blob_and_no_source(shelf, bench, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    b.load(a)
    b.image(a)
    (b.folder / a.digest).unlink()
    other = bench()
    assert other.tiers.residency(a) is Residency.DISK
    other.lease(a).release()
    assert shelf.fetched == ["a"]
    assert not (b.folder / a.digest).exists()
    assert "image_damaged" not in caplog.text


@pytest.mark.parametrize("damage", ["cut off", "random", "of another", "empty", "one bit"])
@pytest.mark.parametrize("blob", [True, False])
def test_a_damaged_image_is_packed_again(damage, blob, shelf, bench, caplog):
    a, c = make(shelf, "ac")
    b = bench()
    b.load(a, c)
    image, others, good = b.image(a), b.image(c).read_bytes(), b.image(a).read_bytes()
    bad = {"cut off": good[:-4], "random": b"\xa5" * len(good), "of another": others, "empty": b""}
    bad["one bit"] = good[:-1] + bytes([good[-1] ^ 1])
    image.write_bytes(bad[damage])
    if not blob:
        (b.folder / a.digest).unlink()
    other = bench()
    other.lease(a).release()
    assert "image_damaged" in caplog.text
    assert other.tiers.status()[Residency.DISK].checksum_failures == 1
    assert other.image(a).read_bytes() == good
    assert sorted(shelf.fetched) == (["a", "c"] if blob else ["a", "a", "c"])


@pytest.mark.parametrize("at", [-1, 0, 20])  # a value, the header's length, the header
def test_a_blob_damaged_after_its_download_is_downloaded_again(at, shelf, bench, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    b.load(a, to=Residency.HOST)
    b.image(a).unlink()
    blob = bytearray((b.folder / a.digest).read_bytes())
    blob[at] ^= 1
    (b.folder / a.digest).write_bytes(blob)
    bench().lease(a).release()
    assert "blob_damaged" in caplog.text
    assert shelf.fetched == ["a", "a"]


def test_a_blob_is_packed_while_it_is_verified_and_usable_once_verified(shelf, bench, monkeypatch):
    (a,) = make(shelf, "a")
    b = bench()
    b.tiers.pin(a, Residency.DISK)
    b.until(lambda: b.tiers.residency(a) is Residency.DISK)
    packed, gate, verify = threading.Event(), threading.Event(), DiskCache.verify

    def pack(*arguments: object) -> object:
        sums = blob_packing.pack(*arguments)
        packed.set()
        return sums

    def slow(cache: DiskCache, digest: str) -> None:
        assert packed.wait(10)
        assert gate.wait(10)
        verify(cache, digest)

    monkeypatch.setattr(loader, "pack", pack)
    monkeypatch.setattr(DiskCache, "verify", slow)
    other = bench()
    other.tiers.request(a)
    assert packed.wait(10)
    other.tiers.advance()
    assert other.tiers.residency(a) is Residency.DISK
    gate.set()
    other.lease(a).release()


def test_a_blob_that_is_replaced_while_it_is_packed_is_packed_again(shelf, bench, monkeypatch):
    (a,) = make(shelf, "a")
    b = bench()
    b.load(a, to=Residency.HOST)
    good_image, blob = b.image(a).read_bytes(), b.folder / a.digest
    b.image(a).unlink()
    good, verify = blob.read_bytes(), DiskCache.verify

    def replacing(cache: DiskCache, digest: str) -> None:
        assert packed.wait(10)
        (b.folder / "new").write_bytes(good)
        (b.folder / "new").replace(blob)
        verify(cache, digest)

    def pack(*arguments: object) -> object:
        sums = blob_packing.pack(*arguments)
        packed.set()
        return sums

    packed = threading.Event()
    monkeypatch.setattr(loader, "pack", pack)
    monkeypatch.setattr(DiskCache, "verify", replacing)
    blob.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    other = bench()
    other.lease(a).release()
    assert other.image(a).read_bytes() == good_image


def test_closing_while_a_blob_is_packed_counts_as_no_failure(shelf, bench, monkeypatch, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    b.tiers.pin(a, Residency.DISK)
    b.until(lambda: b.tiers.residency(a) is Residency.DISK)
    packing, gate = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> object:
        packing.set()
        assert gate.wait(10)
        return read_spec(*arguments)

    monkeypatch.setattr(loader, "read_spec", slow)
    other = bench()
    other.tiers.request(a)
    assert packing.wait(10)
    other.tiers.close()
    gate.set()
    for thread in other.tiers._loader._packers._threads:
        thread.join(10)
    assert not other.tiers._host.holds(a.digest)  # it ended early
    assert caplog.messages == []


def test_a_blob_is_not_verified_before_the_host_has_memory_for_it(shelf, bench, monkeypatch):
    a, c = make(shelf, "ac")
    b = bench()
    for ref in (a, c):
        b.tiers.pin(ref, Residency.DISK)
        b.until(lambda: b.tiers.residency(ref) is Residency.DISK)  # noqa: B023
    verified, verify = list[str](), DiskCache.verify

    def noting(cache: DiskCache, digest: str) -> None:
        verified.append(digest)
        verify(cache, digest)

    monkeypatch.setattr(DiskCache, "verify", noting)
    other = bench(host=1)
    other.tiers.pin(a, Residency.HOST)
    other.until(lambda: other.tiers.residency(a) is Residency.HOST)
    tried = threading.Event()
    reserve = other.tiers._host.reserve

    def full(*arguments: object, **more: object) -> object:
        tried.set()
        return reserve(*arguments, **more)

    monkeypatch.setattr(other.tiers._host, "reserve", full)
    other.tiers.prefetch(c, Residency.HOST)
    other.until(tried.is_set)
    other.tiers._loader._verifiers.shutdown()
    assert verified == [a.digest]


def test_the_image_of_a_passing_pin_is_not_written(shelf, bench):
    a, c = make(shelf, "ac")
    b = bench(gpu=1, host=1)
    b.tiers.pin(a, Residency.HOST, passing=True)
    b.until(lambda: b.tiers.residency(a) is Residency.HOST)
    b.tiers.unpin(a.digest)
    b.load(c)
    b.image(c)  # which waited behind what was packed before it
    assert not b.tiers._disk.has_image(a.digest)
    b.lease(a).release()  # packed again, and for good
    b.image(a)
    assert shelf.fetched == ["a", "c"]


def test_the_image_of_an_adapter_requested_during_a_passing_load_is_written(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.gates["a"] = threading.Event()
    b.tiers.pin(a, Residency.HOST, passing=True)
    b.tiers.advance()
    b.tiers.request(a)
    b.tiers.advance()
    shelf.gates["a"].set()
    b.lease(a).release()
    b.image(a)


def test_an_image_that_the_disk_cannot_read_is_packed_again(shelf, bench, monkeypatch, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    b.load(a)
    good = b.image(a).read_bytes()
    other = bench()

    def unreadable(file: ImageFile, out: torch.Tensor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ImageFile, "read", unreadable)
    other.lease(a).release()
    assert "image_damaged" in caplog.text
    assert other.image(a).read_bytes() == good


def test_an_engine_of_another_dtype_packs_for_itself(shelf, bench):
    (a,) = make(shelf, "a")
    b, half = bench(), bench(dtype=torch.float16)
    b.load(a)
    image = b.image(a)
    half.lease(a).release()
    assert half.image(a).name != image.name
    bench().lease(a).release()
    bench(dtype=torch.float16).lease(a).release()
    assert shelf.fetched == ["a"]


def test_an_image_from_before_the_limits_were_lowered_is_not_used(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.load(a)
    b.image(a)
    strict = bench(limits=replace(LIMITS, max_rank=2))
    assert isinstance(strict.failure(a), AdapterTooLarge)


def test_an_adapter_is_loaded_though_its_image_cannot_be_written(shelf, bench, monkeypatch, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    tried = threading.Event()

    def full(path: Path, *image: object) -> None:
        path.write_bytes(b"half")
        tried.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(image_file, "write_image", full)
    b.lease(a).release()
    assert tried.wait(10)
    b.tiers.close()
    assert "image_not_written" in caplog.text
    assert [path.name for path in b.folder.iterdir()] == [a.digest]


def test_a_load_that_waits_for_memory_is_woken_when_an_image_was_written(shelf, bench, monkeypatch):
    a, c = make(shelf, "ac")
    b = bench(gpu=2, host=1)
    written, gate = threading.Event(), threading.Event()

    def slow(*image: object) -> None:
        written.set()
        gate.wait(10)

    monkeypatch.setattr(image_file, "write_image", slow)
    b.load(a)
    assert written.wait(10)
    b.load(c, to=Residency.DISK)
    for _ in range(5):
        b.tiers.advance()
        assert b.tiers.residency(c) is Residency.DISK
    gate.set()
    b.load(c)


def test_an_image_satisfies_a_pin_to_disk(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.load(a)
    b.image(a)
    (b.folder / a.digest).unlink()
    other = bench()
    other.tiers.pin(a, Residency.DISK)
    for _ in range(3):
        other.tiers.advance()
    assert other.report()["a"] == (Residency.DISK, 0, True)
    assert other.tiers._disk._pins
    assert shelf.fetched == ["a"]
