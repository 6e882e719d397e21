"""Downloads to the disk cache: one per blob, across threads and processes."""

import hashlib
import subprocess
import sys
import threading
import time

import pytest

from lorikeet_engine.errors import AdapterLoadFailed
from lorikeet_engine.residency.disk.cache import DiskCache
from tests.engine.residency.conftest import KIND, OTHER


def test_one_of_many_callers_fetches_a_blob_and_the_others_wait(refs, shelf, tmp_path):
    size = shelf.blob("a").stat().st_size
    caches = [DiskCache(tmp_path / "disk", 8 * size, shelf, KIND) for _ in range(3)]
    shelf.gates["a"] = threading.Event()
    threads = [threading.Thread(target=cache.fetch, args=(refs[0],)) for cache in caches * 3]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    shelf.gates["a"].set()
    for thread in threads:
        thread.join(10)
    assert shelf.fetched == ["a"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [refs[0].digest]


def test_an_adapter_that_another_process_has_packed_is_not_fetched_though_its_blob_is_gone(
    cache, refs, shelf, tmp_path
):
    here, another = cache(room=8), cache(room=8)
    with another.adding_image(refs[0].digest) as part:
        part.write_bytes(b"packed")
    here.fetch(refs[0])  # before it has looked at the folder again
    assert shelf.fetched == []
    assert here.image(refs[0].digest).read_bytes() == b"packed"
    here.remove_image(refs[0].digest)  # it was damaged
    here.fetch(refs[0])
    assert shelf.fetched == ["a"]


def test_a_waiting_caller_fetches_the_blob_itself_after_another_has_failed(
    cache, refs, shelf, tmp_path
):
    disk, waiting, tried = cache(room=8), threading.Event(), []

    class Failing:
        def fetch(self, ref, path):
            tried.append(ref)
            path.write_bytes(b"half")
            waiting.wait(10)
            raise OSError("connection reset")

    first = DiskCache(tmp_path / "disk", 2**20, Failing(), KIND)

    def fail() -> None:
        with pytest.raises(OSError, match="reset"):
            first.fetch(refs[0])

    failing = threading.Thread(target=fail)
    failing.start()
    while not tried:
        time.sleep(0.001)
    second = threading.Thread(target=disk.fetch, args=(refs[0],))
    second.start()
    time.sleep(0.05)
    assert shelf.fetched == []
    waiting.set()
    failing.join(10)
    second.join(10)
    assert disk.blob(refs[0].digest).read_bytes() == shelf.blob("a").read_bytes()


def test_the_digest_computed_by_the_source_must_match(refs, tmp_path):
    class Hashing:
        def fetch(self, ref, path):
            path.write_bytes(b"other")
            return hashlib.sha256(b"other").hexdigest()

    disk = DiskCache(tmp_path / "disk", 2**20, Hashing(), KIND)
    with pytest.raises(AdapterLoadFailed, match="register the adapter again"):
        disk.fetch(refs[0])
    assert list((tmp_path / "disk").iterdir()) == []


DYING = """
import sys, time
from pathlib import Path
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.disk.cache import DiskCache

class Half:
    def fetch(self, ref, path):
        path.write_bytes(b"h" * 2**20)
        print("half", flush=True)
        time.sleep(60)

folder, digest, fingerprint = sys.argv[1:]
DiskCache(Path(folder), 2**30, Half(), fingerprint).fetch(AdapterRef("acme", "a", 1, digest))
"""


def test_after_a_process_dies_in_a_download_the_next_one_downloads(cache, refs, shelf, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, str(tmp_path / "disk"), refs[0].digest, KIND],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    disk = cache(room=8)
    waiting = threading.Thread(target=disk.fetch, args=(refs[0],))
    waiting.start()
    time.sleep(0.05)
    assert shelf.fetched == []
    process.kill()
    process.communicate()
    waiting.join(10)
    assert disk.blob(refs[0].digest).read_bytes() == shelf.blob("a").read_bytes()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [refs[0].digest]


SHARING = """
import hashlib, sys, time
from pathlib import Path
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.disk.cache import DiskCache

remote, folder, budget, fingerprint, *adapters = sys.argv[1:]

class Copy:
    def fetch(self, ref, path):
        path.write_bytes(b"")
        time.sleep(0.002)
        path.write_bytes((Path(remote) / ref.name).read_bytes())

cache = DiskCache(Path(folder), int(budget), Copy(), fingerprint)
print("ready", flush=True)
sys.stdin.readline()  # until the other is ready too
refs = [AdapterRef("acme", pair.split(":")[0], 1, pair.split(":")[1]) for pair in adapters]
blobs = images = 0
for n in range(300):
    ref = refs[(n * n + n // 7) % len(refs)]
    image = (fingerprint + ref.digest).encode() * 40
    try:
        assert cache.image(ref.digest).read_bytes() == image
        images += 1
        continue
    except FileNotFoundError:
        pass
    try:
        cache.fetch(ref)
        data = cache.blob(ref.digest).read_bytes()
    except FileNotFoundError:
        continue
    assert hashlib.sha256(data).hexdigest() == ref.digest
    blobs += 1
    if not cache.has_image(ref.digest):
        with cache.adding_image(ref.digest) as part:
            part.write_bytes(image[:99])
            time.sleep(0.002)
            part.write_bytes(image)
    cache.pin(refs[0].digest)
    cache.apply_pins()
    if cache.pin(refs[0].digest):
        cache.fetch(refs[1])
        assert cache.holds(refs[0].digest)
        cache.unpin(refs[0].digest)
        cache.apply_pins()
assert blobs and images, (blobs, images)
"""


@pytest.mark.parametrize("other", [KIND, OTHER])
def test_two_processes_share_a_folder(other, shelf, refs, tmp_path):
    blob_bytes, folder = shelf.blob("a").stat().st_size, tmp_path / "disk"
    adapters = [f"{ref.name}:{ref.digest}" for ref in refs]
    arguments = [str(tmp_path / "remote"), str(folder), str(2 * blob_bytes)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SHARING, *arguments, fingerprint, *adapters],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for fingerprint in (KIND, other)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    names = {ref.digest + end for ref in refs for end in ("", f".{KIND}", f".{OTHER}")}
    assert set(sizes) <= names
    assert 0 < sum(sizes.values()) <= 4 * blob_bytes  # each exceeds the budget by a file at most
