"""The disk cache: whole files, removal of the least recently used, pins, shared by processes."""

import os
import threading
import time

import pytest

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterLoadFailed
from lorikeet_engine.residency.changes import ResidencyChanges
from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.disk.watcher import DiskWatcher
from tests.engine.residency.conftest import KIND, OTHER


def add_image(cache: DiskCache, ref: AdapterRef, size: int) -> None:
    with cache.adding_image(ref.digest) as part:
        part.write_bytes(b"i" * size)
    time.sleep(0.01)  # a later time in the file's inode


def fetch(cache: DiskCache, ref: AdapterRef) -> None:
    cache.fetch(ref)
    time.sleep(0.01)


def pin(cache: DiskCache, digest: str) -> bool:
    """Pin an adapter as the watcher does once a second; return whether its file is kept now."""
    cache.pin(digest)
    cache.apply_pins()
    return cache.pin(digest)


def kinds(cache: DiskCache, refs: list[AdapterRef], folder) -> list[str]:
    """Files by adapter: b for a blob, i for an image."""
    names = {path.name for path in (folder / "disk").iterdir()}
    cache.changed()  # as the watcher asks, once a second
    assert all(cache.holds(ref.digest) == bool(_kinds(ref, names)) for ref in refs)
    return [_kinds(ref, names) for ref in refs]


def _kinds(ref: AdapterRef, names: set[str]) -> str:
    return "b" * (ref.digest in names) + "i" * (f"{ref.digest}.{KIND}" in names)


def test_the_least_recently_used_blob_beyond_the_budget_is_removed(cache, refs, tmp_path):
    disk = cache(room=2)
    for ref in (refs[0], refs[1], refs[0], refs[2]):
        fetch(disk, ref)
    assert kinds(disk, refs, tmp_path) == ["b", "", "b", ""]
    assert pin(disk, refs[0].digest)
    for ref in (refs[3], refs[1]):
        fetch(disk, ref)
    assert kinds(disk, refs, tmp_path) == ["b", "b", "", ""]


def test_images_count_and_blobs_with_an_image_are_removed_first(cache, refs, shelf, tmp_path):
    disk, size = cache(room=3), shelf.blob("a").stat().st_size
    for ref in refs[:2]:
        fetch(disk, ref)
        add_image(disk, ref, size)
    assert kinds(disk, refs, tmp_path) == ["i", "bi", "", ""]
    fetch(disk, refs[2])
    assert kinds(disk, refs, tmp_path) == ["i", "i", "b", ""]
    disk.image(refs[0].digest)
    fetch(disk, refs[3])
    assert kinds(disk, refs, tmp_path) == ["i", "", "b", "b"]


def test_a_blob_that_is_used_beside_its_image_ages_like_the_rest(cache, refs, shelf, tmp_path):
    disk, size = cache(room=3), shelf.blob("a").stat().st_size
    fetch(disk, refs[0])
    add_image(disk, refs[0], size)
    disk.blob(refs[0].digest)
    for ref in refs[1:3]:
        fetch(disk, ref)
    assert kinds(disk, refs, tmp_path) == ["b", "b", "b", ""]


def test_images_of_another_fingerprint_are_not_used_and_age(cache, refs, shelf, tmp_path):
    mine, other = cache(room=2), cache(room=2, fingerprint=OTHER)
    add_image(other, refs[0], shelf.blob("a").stat().st_size)
    assert other.holds(refs[0].digest)
    assert not mine.holds(refs[0].digest)
    assert not mine.has_image(refs[0].digest)
    assert not pin(mine, refs[0].digest)
    with pytest.raises(FileNotFoundError):
        mine.image(refs[0].digest)
    fetch(mine, refs[1])
    fetch(mine, refs[2])
    other.changed()
    assert not other.holds(refs[0].digest)


def test_files_that_other_processes_add_beyond_the_budget_evict_older_files(
    cache, refs, shelf, tmp_path
):
    disk = cache(room=2)
    fetch(disk, refs[0])
    assert pin(disk, refs[0].digest)
    fetch(disk, refs[1])
    for age_s, ref in ((5, refs[2]), (0, refs[3])):
        path = tmp_path / "disk" / ref.digest
        path.write_bytes(shelf.blob("a").read_bytes())
        os.utime(path, (time.time() - age_s,) * 2)
    assert disk.changed() is not None
    disk.trim()
    assert kinds(disk, refs, tmp_path) == ["b", "b", "b", "b"], "all are new"
    for ref in refs[:3]:
        os.utime(tmp_path / "disk" / ref.digest, (time.time() - 60,) * 2)
    watcher = DiskWatcher(disk, ResidencyChanges(lambda _: Residency.REMOTE))
    watcher.close()
    assert kinds(disk, refs, tmp_path) == ["b", "", "", "b"]
    assert disk.status().evictions == 2


def test_only_remote_adapters_are_fetched(cache, refs, shelf):
    disk = cache(room=8)
    for _ in range(2):
        disk.fetch(refs[0])
    assert shelf.fetched == ["a"]
    assert disk.blob(refs[0].digest).read_bytes() == shelf.blob("a").read_bytes()


def test_an_image_appears_only_once_it_is_complete(cache, refs, tmp_path):
    disk = cache(room=8)
    with disk.adding_image(refs[0].digest) as part:
        part.write_bytes(b"half")
        assert not disk.holds(refs[0].digest)
        part.write_bytes(b"whole")
    assert disk.image(refs[0].digest).read_bytes() == b"whole"


def test_a_file_is_synced_before_it_gets_its_name(cache, refs, monkeypatch):
    disk, synced, fsync = cache(room=8), [], os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_size, disk.holds(refs[0].digest)))

    monkeypatch.setattr(os, "fsync", watched)
    add_image(disk, refs[0], 10)
    assert synced == [(10, False)]
    assert disk.holds(refs[0].digest)


def test_an_image_whose_writing_failed_leaves_nothing(cache, refs, tmp_path):
    disk = cache(room=8)

    def write() -> None:
        with disk.adding_image(refs[0].digest) as part:
            part.write_bytes(b"half")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_partial_file_of_a_crash_is_no_image_and_is_removed_once_old(cache, refs, tmp_path):
    disk = cache(room=8)
    add_image(disk, refs[0], 10)
    for age, kind in [(1, ""), (time.time(), f".{KIND}")]:
        part = tmp_path / "disk" / f"{refs[1].digest}{kind}.0f.part"
        part.write_bytes(b"half")
        os.utime(part, (age, age))
    again = cache(room=8)
    assert kinds(again, refs, tmp_path) == ["i", "", "", ""]
    assert [p.name for p in (tmp_path / "disk").glob("*.part")] == [part.name]


@pytest.mark.parametrize("kind", ["b", "i"])
def test_a_process_never_removes_files_that_another_process_has_pinned(
    kind, cache, refs, shelf, tmp_path
):
    one, two = cache(room=1), cache(room=1)
    if kind == "b":
        fetch(one, refs[0])
    else:
        add_image(one, refs[0], shelf.blob("a").stat().st_size)
    assert pin(one, refs[0].digest)
    for ref in refs[1:3]:
        fetch(two, ref)
    assert kinds(two, refs, tmp_path) == [kind, "", "b", ""]
    one.unpin(refs[0].digest)
    one.apply_pins()
    fetch(two, refs[1])
    assert kinds(two, refs, tmp_path) == ["", "b", "", ""]


def test_a_pin_keeps_the_image_and_lets_the_blob_go(cache, refs, shelf, tmp_path):
    disk = cache(room=2)
    fetch(disk, refs[0])
    add_image(disk, refs[0], shelf.blob("a").stat().st_size)
    assert pin(disk, refs[0].digest)
    for ref in refs[1:3]:
        fetch(disk, ref)
    assert kinds(disk, refs, tmp_path) == ["i", "", "b", ""]


def test_a_pinned_file_is_not_replaced_by_a_process_that_adds_it_too(cache, refs, tmp_path):
    one, two = cache(room=1), cache(room=1)
    with two.adding_image(refs[0].digest) as part:
        part.write_bytes(b"second")
        with one.adding_image(refs[0].digest) as first:
            first.write_bytes(b"first")
        assert pin(one, refs[0].digest)
    for ref in refs[1:3]:
        fetch(two, ref)
    assert kinds(two, refs, tmp_path) == ["i", "", "b", ""]
    assert one.image(refs[0].digest).read_bytes() == b"first"


def test_a_pin_whose_image_was_damaged_keeps_the_blob_or_is_unmet(cache, refs):
    disk = cache(room=8)
    for ref in refs[:2]:
        add_image(disk, ref, 10)
        assert pin(disk, ref.digest)
        disk.remove_image(ref.digest)
    disk.fetch(refs[0])
    assert pin(disk, refs[0].digest)
    assert not pin(disk, refs[1].digest)


def test_queries_of_the_index_do_not_touch_the_disk(cache, refs, monkeypatch):
    disk, other = cache(room=8), cache(room=8)
    disk.fetch(refs[0])
    add_image(disk, refs[1], 10)
    other.changed()
    add_image(disk, refs[2], 10)
    disk.remove_image(refs[1].digest)
    for name in ("access", "open", "stat", "utime", "listdir"):
        monkeypatch.setattr(os, name, None)
    assert [disk.holds(ref.digest) for ref in refs] == [True, False, True, False]
    # Another process knows what it saw last.
    assert [other.holds(ref.digest) for ref in refs] == [True, True, False, False]


def test_a_file_found_missing_or_present_updates_the_index_at_once(cache, refs):
    disk, other = cache(room=8), cache(room=8)
    disk.fetch(refs[0])
    assert not other.holds(refs[0].digest)
    other.blob(refs[0].digest).unlink()
    assert other.holds(refs[0].digest)
    with pytest.raises(FileNotFoundError):
        other.blob(refs[0].digest)
    assert not other.holds(refs[0].digest)


def test_an_invalid_digest_never_becomes_a_path(cache, shelf, tmp_path):
    disk = cache(room=8)
    outside = AdapterRef("acme", "a", 1, "../" * 3 + "x" * 55)
    (tmp_path / "secret").write_bytes(b"s")
    for digest in (outside.digest, "../secret"):
        assert not disk.holds(digest)
        assert not pin(disk, digest)
    with pytest.raises(AdapterLoadFailed, match="no digest"):
        disk.fetch(outside)
    assert shelf.fetched == []


def test_threads_that_add_one_image_at_the_same_time_do_not_disturb_each_other(cache, refs):
    disk, together = cache(room=8), threading.Barrier(2)

    def write() -> None:
        with disk.adding_image(refs[0].digest) as part:
            part.write_bytes(b"whole")
            together.wait(10)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert disk.image(refs[0].digest).read_bytes() == b"whole"
