"""Garbage collection deletes all garbage, and nothing that is needed or about to be named."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.garbage_collection import GarbageCollector
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import VersionRecord
from lorikeet.catalog.resumable_uploads import ResumableUploads
from lorikeet.catalog.snapshots import MANIFESTS, PARTITIONS_PREFIX, Snapshots
from lorikeet.catalog.store.gc_protection import MARKS, protect
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import Conflict, InvalidInput, ObjectNotFound
from tests.catalog.test_crash import Crash, Mortal
from tests.catalog.test_crash import register as register_blob

Register = Callable[..., VersionRecord]
DAY = 86400.0
NOW = time.time() + 100 * DAY  # the collector's: all that a test writes is a hundred days old


def collect(reader: CatalogReader, **options: Any) -> list[str]:
    """Collect garbage and return the deleted keys."""
    collector = GarbageCollector(reader, 7 * DAY, clock=lambda: NOW, **options)
    return [found.key for found in collector.collect()]


def put_blob(store: ObjectStore, folder: Path, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    (folder / "garbage").write_bytes(data)
    store.put_file(blob_key(digest), folder / "garbage")
    return digest


def blobs(store: ObjectStore) -> set[str]:
    return {key.rpartition("/")[2] for key in store.list("blobs/")}


def test_blobs_that_no_version_needs_are_deleted(
    catalog: AdapterCatalog,
    store: ObjectStore,
    register: Register,
    clock: list[float],
    tmp_path: Path,
) -> None:
    clock[0] = NOW - 90 * DAY
    used, long_retired, retired, both = (
        register(f"acme/{name}", name.encode()) for name in ("used", "long", "late", "both")
    )
    register("acme/other", b"both")
    catalog.retire("acme", "long", actor="ann")
    catalog.retire("acme", "both", actor="ann")
    clock[0] = NOW - 6 * DAY
    catalog.retire("acme", "late", actor="ann")
    never_named = put_blob(store, tmp_path, b"garbage")
    garbage = {long_retired.digest, never_named}
    everything = blobs(store)

    found = list(
        GarbageCollector(catalog.reader, 7 * DAY, dry_run=True, clock=lambda: NOW).collect()
    )

    assert {object_.key for object_ in found} == {blob_key(digest) for digest in garbage}
    assert sorted(object_.size_bytes for object_ in found) == [4, 7]
    assert blobs(store) == everything
    assert sorted(collect(catalog.reader)) == sorted(object_.key for object_ in found)
    assert blobs(store) == {used.digest, retired.digest, both.digest}
    assert collect(catalog.reader) == []
    assert list(store.list(MARKS)) == []


def test_objects_younger_than_the_grace_period_stay(
    catalog: AdapterCatalog, store: ObjectStore, tmp_path: Path
) -> None:
    digest = put_blob(store, tmp_path, b"not named yet")

    assert list(GarbageCollector(catalog.reader, 1 * DAY).collect()) == []
    assert blobs(store) == {digest}
    with pytest.raises(InvalidInput, match="want a day or more"):
        GarbageCollector(catalog.reader, 3600)


def test_a_retirement_can_be_undone_until_its_blob_is_collected(
    catalog: AdapterCatalog, store: ObjectStore, register: Register, clock: list[float]
) -> None:
    register("acme/support", b"1")
    register("acme/support", b"2", promote=True)
    clock[0] = NOW - 6 * DAY
    catalog.retire("acme", "support", 1, actor="ann")
    collect(catalog.reader)
    catalog.restore("acme", "support", 1, actor="ann")
    catalog.retire("acme", "support", actor="ann")
    clock[0] = NOW + 2 * DAY
    later = GarbageCollector(catalog.reader, 7 * DAY, clock=lambda: NOW + 2 * DAY)
    assert len([found for found in later.collect() if found.key.startswith("blobs/")]) == 2

    for version in (1, None):
        with pytest.raises(Conflict, match="collected: register it again"):
            catalog.restore("acme", "support", version, actor="ann")
    assert register("acme/support", b"1").version == 3
    assert len(blobs(store)) == 1


def test_uploads_in_flight_keep_their_blobs_and_old_uploads_are_deleted(
    catalog: AdapterCatalog, store: ObjectStore, tmp_path: Path
) -> None:
    uploads = ResumableUploads(store)
    digest = put_blob(store, tmp_path, b"there already")
    left, _ = uploads.begin("0" * 64, 7, "key-ann")
    (tmp_path / "partition").write_bytes(b"7 bytes")
    uploads.put(left, 1, tmp_path / "partition")
    time.sleep(2.1)  # S3 counts whole seconds
    grace_began = time.time()
    uploads.begin(digest, 13, "key-ann")
    going_on, _ = uploads.begin("1" * 64, 7, "key-ann")
    uploads.put(going_on, 1, tmp_path / "partition")

    def run(dry_run: bool) -> list[str]:
        collector = GarbageCollector(
            catalog.reader, 7 * DAY, dry_run=dry_run, clock=lambda: grace_began + 7 * DAY
        )
        return [found.key for found in collector.collect()]

    assert run(dry_run=True) == [left.key]
    assert set(uploads.in_flight()) >= {left, going_on}
    assert run(dry_run=False) == [left.key]
    assert blobs(store) == {digest}
    assert uploads.begin("1" * 64, 7, "key-ann") == (going_on, ())
    assert left not in set(uploads.in_flight())


def test_the_newest_snapshots_and_their_partitions_are_kept(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    for number in range(7):
        register("acme/support", str(number).encode(), promote=True)
        catalog.reader.snapshot()
    manifests = list(store.list(MANIFESTS))
    partitions = set(store.list(PARTITIONS_PREFIX))

    went = collect(catalog.reader)

    assert list(store.list(MANIFESTS)) == manifests[:4]  # the newest comes first
    assert set(store.list(PARTITIONS_PREFIX)) == partitions - set(went)
    assert len(partitions - set(store.list(PARTITIONS_PREFIX))) == 3
    snapshots = Snapshots(store)
    for key in manifests[:4]:
        manifest = snapshots.newest(up_to=int(key[-17:-5]))
        assert manifest is not None
        assert f"-{manifest.seq:012d}.json" in key
        assert len(snapshots.read(set(manifest.partitions))) == len(set(manifest.partitions))
    opened = CatalogReader(store)
    opened.refresh()
    assert opened.ask(lambda state: list(state.adapters())) == [
        catalog.reader.state.adapter("acme", "support")
    ]


def test_a_partition_that_a_snapshot_names_again_counts_as_new(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    catalog = AdapterCatalog.init(store)
    catalog.create_tenant("acme", actor="ann")
    register_blob(store, tmp_path, b"1")
    snapshots, named = Snapshots(store), []
    for change in (catalog.reader.refresh, lambda: catalog.pin("acme", "support", actor="ann")):
        change()
        catalog.reader.snapshot()
        named.append(snapshots.newest().partitions[-1])  # type: ignore[union-attr]
    for key in store.list(PARTITIONS_PREFIX):
        os.utime(Path(store.url) / key, (time.time() - 30 * DAY,) * 2)
    catalog.unpin("acme", "support", actor="ann")
    catalog.reader.snapshot()

    named.append(snapshots.newest().partitions[-1])  # type: ignore[union-attr]
    assert named[0] == named[2] != named[1]
    times = {key[-64:]: store.modified(key) for key in store.list(PARTITIONS_PREFIX)}
    assert times[named[2]] > time.time() - DAY > times[named[1]]


class Turns:
    """Order of calls: each letter allows that thread one call; after the last, all may call."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._changed = threading.Condition()

    def take(self, who: str, call: Callable[[], Any]) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._order[:1] in ("", who), timeout=5)
            try:
                return call()
            finally:
                self._order = self._order[1:]
                self._changed.notify_all()

    def leave(self, who: str) -> None:
        with self._changed:
            self._order = self._order.replace(who, "")
            self._changed.notify_all()


class Taking:
    """Store whose calls about blobs and marks wait for their turn."""

    def __init__(self, store: ObjectStore, who: str, turns: Turns) -> None:
        self._store = store
        self._who = who
        self._turns = turns

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("modified", "touch", "put_file", "put_if_absent", "delete", "scan"):
            return method

        def call(key: str, *arguments: Any) -> Any:
            def act() -> Any:
                found = method(key, *arguments)
                return iter(list(found)) if name == "scan" else found

            whole = key in ("blobs/", MARKS, "uploads/", MANIFESTS, PARTITIONS_PREFIX)
            return act() if whole else self._turns.take(self._who, act)

        return call


ORDERS = [
    "".join("c" if at in chosen else "g" for at in range(9)) for chosen in combinations(range(9), 5)
]


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_claimed_blob_survives_any_interleaving_with_a_collection(
    at_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.catalog.store.gc_protection._POLL_S", 0.001)

    def run(collector: GarbageCollector, turns: Turns, went: list[str]) -> None:
        went.extend(found.key for found in collector.collect())
        turns.leave("g")

    store, spared = LocalStore(tmp_path / "store"), 0
    AdapterCatalog.init(store)
    for order in ORDERS:
        digest = put_blob(store, tmp_path, order.encode())
        blob = Path(store.url) / blob_key(digest)
        os.utime(blob, (time.time() - 30 * DAY,) * 2)
        turns = Turns(order)
        collector = GarbageCollector(CatalogReader(Taking(store, "g", turns)), 1 * DAY)  # type: ignore[arg-type]
        went: list[str] = []

        collecting = threading.Thread(target=run, args=(collector, turns, went))
        collecting.start()
        claimant: Any = Taking(store, "c", turns)
        put = partial(claimant.put_file, blob_key(digest), tmp_path / "garbage")
        try:
            protect(claimant, blob_key(digest), put if at_hand else None)
            claimed = True
        except ObjectNotFound:
            claimed = False
        turns.leave("c")
        collecting.join(10)
        assert blob.exists() == claimed, order
        assert claimed or not at_hand
        assert claimed or went == [blob_key(digest)]
        assert list(store.list(MARKS)) == []
        spared += went == []

    assert 0 < spared < len(ORDERS)


@pytest.mark.parametrize("after", [False, True])
def test_a_collection_that_crashes_anywhere_deletes_nothing_needed(
    tmp_path: Path, after: bool
) -> None:
    crashes, survived = 0, False
    while not survived:
        store = LocalStore(tmp_path / f"store-{crashes}")
        catalog = AdapterCatalog.init(store)
        catalog.create_tenant("acme", actor="ann")
        _, needed = register_blob(store, tmp_path, b"needed")
        put_blob(store, tmp_path, b"garbage")
        for _ in range(6):
            catalog.create_tenant(f"t{catalog.reader.state.seq}", actor="ann")
            catalog.reader.snapshot()
        mortal: Any = Mortal(store, crashes + 1, after=after)
        try:
            collect(CatalogReader(mortal))
            survived = True
        except Crash:
            crashes += 5
        collect(catalog.reader)
        assert blobs(store) == {needed}
        opened = CatalogReader(store)
        opened.refresh()
        assert len(opened.ask(lambda state: state.tenants())) == 7
        assert len(list(store.list(MANIFESTS))) == 4

    assert crashes >= 30
