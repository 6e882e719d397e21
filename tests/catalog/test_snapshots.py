"""Snapshots give the same catalog from few objects, also after crashes and concurrent writers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.log import Log
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope, VersionRecord, secret_sha256
from lorikeet.catalog.snapshots import Snapshots, partition_to_bytes
from lorikeet.catalog.state import (
    PARTITIONS,
    CatalogState,
    PartitionsNotRead,
    UnreadPartition,
    partition_of,
)
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import StoreError, StoreRefused, UnknownModel
from tests.catalog.crashing_store import Crash, Mortal

Register = Callable[..., VersionRecord]


class Watched(LocalStore):
    """Local store that records the keys it reads and writes, but for checks of the store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.got: list[str] = []
        self.put: list[str] = []

    def get(self, key: str) -> bytes:
        self.got.append(key)
        return super().get(key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        super().put_if_absent(key, data)
        if not key.startswith("uploads/conditional-write-"):
            self.put.append(key)


def contents(reader: CatalogReader) -> list[bytes]:
    """Refresh and return the bytes of every partition."""
    reader.refresh()
    reader.read(range(PARTITIONS + 1))
    return [
        partition_to_bytes(partition)
        for partition in reader.state.partitions
        if not isinstance(partition, UnreadPartition)
    ]


def filled(store: ObjectStore, tenants: int = 20) -> AdapterCatalog:
    catalog = AdapterCatalog.init(store)
    for number in range(tenants):
        catalog.create_tenant(f"t{number}", actor="ann")
    return catalog


def unread(state: CatalogState) -> int:
    return sum(isinstance(partition, UnreadPartition) for partition in state.partitions)


def test_snapshot_and_tail_give_the_state_of_the_whole_log(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    register("acme/support", b"1")
    _, secret = catalog.create_key("acme", [Scope.INFER], actor="ann")
    admin, _ = catalog.create_key(None, [Scope.ADMIN], actor="ann")
    assert catalog.reader.snapshot() == catalog.reader.state.seq
    register("acme/support", b"2", promote=True, shared=True)
    catalog.pin("acme", "support", actor="ann")
    catalog.revoke_key(catalog.create_key(None, [Scope.ADMIN], actor="ann")[0].id, actor="ann")

    reader = CatalogReader(store)
    reader.refresh()
    assert reader.ask(lambda state: state.resolve("acme/support", "other").version) == 2
    key = reader.ask(lambda state: state.key_by_sha256(secret_sha256(secret)))
    assert key is not None
    assert key.tenant == "acme"
    assert reader.ask(lambda state: state.admin_keys()) == {admin.id}
    assert reader.ask(lambda state: state.pin_of("acme", "support")) is not None
    assert contents(reader) == contents(catalog.reader)


def test_resolving_a_name_reads_its_partition_and_the_tail(tmp_path: Path) -> None:
    writer = filled(LocalStore(tmp_path))
    writer.reader.snapshot()
    writer.create_tenant("late", actor="ann")
    watched = Watched(tmp_path)
    reader = CatalogReader(watched)
    reader.refresh()
    with pytest.raises(UnknownModel):
        reader.ask(lambda state: state.resolve("t3/x", "t3"))

    kinds = [key.partition("/")[0] for key in watched.got]
    assert kinds == ["snapshots", "log", "snapshot-partitions"]
    assert unread(reader.state) == PARTITIONS


def test_a_question_raises_with_every_partition_that_it_lacks(tmp_path: Path) -> None:
    filled(LocalStore(tmp_path)).reader.snapshot()
    reader = CatalogReader(LocalStore(tmp_path))
    reader.refresh()

    with pytest.raises(PartitionsNotRead) as missing:
        reader.state.tenants()
    assert missing.value.numbers == set(range(PARTITIONS))


def test_only_changed_partitions_are_written_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    catalog = filled(watched)
    catalog.reader.snapshot()
    catalog.limit_tenant("t3", max_concurrent=7, actor="ann")
    watched.put.clear()
    catalog.reader.snapshot()
    assert [key.partition("/")[0] for key in watched.put] == ["snapshot-partitions", "snapshots"]

    watched.put.clear()
    watched.got.clear()
    other = AdapterCatalog(watched)
    other.reader.refresh()
    other.limit_tenant("t4", max_concurrent=7, actor="ann")
    other.reader.snapshot()
    assert [key.partition("/")[0] for key in watched.put] == [
        "log",
        "snapshot-partitions",
        "snapshots",
    ]
    assert sum(key.startswith("snapshot-partitions/") for key in watched.got) == 1

    assert contents(CatalogReader(watched)) == contents(catalog.reader)


def test_partitions_that_hold_nothing_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lorikeet.catalog.snapshots.protect", lambda _, key, put: pytest.fail(f"{key} again")
    )
    filled(LocalStore(tmp_path), 2).reader.snapshot()
    assert contents(CatalogReader(LocalStore(tmp_path)))[PARTITIONS]


def test_a_writer_reads_the_partitions_that_a_decision_needs(
    tmp_path: Path, register: Register
) -> None:
    filled(LocalStore(tmp_path)).reader.snapshot()
    writer = AdapterCatalog(LocalStore(tmp_path))

    assert writer.limit_tenant("t5", max_concurrent=3, actor="ann").limits.max_concurrent == 3
    assert writer.create_key("t6", [Scope.INFER], actor="ann")[0].tenant == "t6"
    assert contents(writer.reader) == contents(CatalogReader(LocalStore(tmp_path)))


def test_concurrent_snapshots_are_consistent(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    def work(number: int) -> int:
        own = AdapterCatalog(store)
        own.create_tenant(f"t{number}", actor="ann")
        return own.reader.snapshot()

    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(work, range(3)))

    assert max(made) <= catalog.reader.refresh().seq
    assert contents(CatalogReader(store)) == contents(catalog.reader)


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_anywhere_in_a_snapshot_leaves_a_readable_catalog(
    tmp_path: Path, after: bool
) -> None:
    calls = 0
    survived = False
    while not survived:
        store = LocalStore(tmp_path / f"store-{calls}")
        catalog = filled(store, 3)
        catalog.reader.snapshot()
        catalog.limit_tenant("t0", max_concurrent=2, actor="ann")
        catalog.limit_tenant("t1", max_concurrent=2, actor="ann")
        calls += 1
        mortal: Any = Mortal(store, calls, after=after)
        try:
            CatalogReader(mortal).snapshot()
            survived = True
        except Crash:
            pass
        assert contents(CatalogReader(store)) == contents(catalog.reader)
        CatalogReader(store).snapshot()
        reader = CatalogReader(store)
        reader.refresh()
        assert not any(
            isinstance(partition, UnreadPartition) and partition.pending
            for partition in reader.state.partitions
        )
        assert contents(reader) == contents(catalog.reader)

    assert calls >= 9  # what there is to read, twice two partitions, the manifest


def test_a_reader_that_lives_long_keeps_few_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.catalog.reader.SNAPSHOT_EVERY", 4)
    writer = filled(LocalStore(tmp_path))
    writer.reader.snapshot()
    reader = CatalogReader(LocalStore(tmp_path))
    reader.refresh()
    for number in range(50):
        writer.limit_tenant("t3", max_concurrent=number + 1, actor="ann")
        if writer.reader.snapshot_due:
            writer.reader.snapshot()
        reader.refresh()
        held = reader.state.partitions[partition_of("t3")]
        assert isinstance(held, UnreadPartition)
        assert len(held.pending) <= 12

    assert contents(reader) == contents(writer.reader)


def test_a_reader_whose_snapshot_was_collected_uses_a_newer_one(tmp_path: Path) -> None:
    writer = filled(LocalStore(tmp_path))
    writer.reader.snapshot()
    reader = CatalogReader(LocalStore(tmp_path))
    reader.refresh()
    (old,) = (tmp_path / "snapshots").iterdir()
    before = set((tmp_path / "snapshot-partitions").glob("*/*"))
    writer.limit_tenant("t3", max_concurrent=7, actor="ann")
    writer.reader.snapshot()
    newest = Snapshots(LocalStore(tmp_path)).newest()
    assert newest is not None
    old.unlink()
    for partition in before:
        if partition.name not in newest.partitions:
            partition.unlink()

    assert reader.ask(lambda state: state.tenant("t3")).limits.max_concurrent == 7
    assert contents(reader) == contents(writer.reader)


def test_an_older_snapshot_that_arrives_late_is_ignored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = filled(store)
    writer.reader.snapshot()
    snapshots = Snapshots(store)
    older = snapshots.newest()
    view = CatalogView(snapshots)
    assert older is not None
    view.begin(older)
    writer.limit_tenant("t3", max_concurrent=7, actor="ann")
    writer.reader.snapshot()
    newer = snapshots.newest()
    assert newer is not None
    view.advance(Log(store).read(older.seq))
    view.rebase(newer)
    view.rebase(older)

    assert view.ask(lambda state: state.tenant("t3")).limits.max_concurrent == 7


def test_old_snapshots_stay_readable(tmp_path: Path) -> None:
    catalog = filled(LocalStore(tmp_path), 1)
    made = []
    for number in range(3):
        made.append(
            (
                catalog.reader.snapshot(),
                partition_to_bytes(catalog.reader.state.partitions[partition_of("t0")]),
            )
        )
        catalog.limit_tenant("t0", max_concurrent=number + 1, actor="ann")
    snapshots = Snapshots(LocalStore(tmp_path))

    for seq, data in made:
        manifest = snapshots.newest(up_to=seq)
        assert manifest is not None
        assert manifest.seq == seq
        digest = manifest.partitions[partition_of("t0")]
        assert partition_to_bytes(snapshots.read([digest])[digest]) == data
    assert snapshots.newest(up_to=made[0][0] - 1) is None
    newest = snapshots.newest()
    assert newest is not None
    assert newest.seq == made[-1][0]


def test_a_damaged_object_is_named_with_its_remedy(tmp_path: Path) -> None:
    catalog = filled(LocalStore(tmp_path))
    catalog.reader.snapshot()
    digest = catalog.reader.state.partitions[partition_of("t3")].digest
    (tmp_path / f"snapshot-partitions/{digest[:2]}/{digest}").write_bytes(b"?")
    reader = CatalogReader(LocalStore(tmp_path))
    reader.refresh()

    with pytest.raises(StoreError, match=rf"snapshot-partitions/.*{digest}.*damaged.*restore"):
        reader.ask(lambda state: state.tenant("t3"))
    (tmp_path / f"snapshot-partitions/{digest[:2]}/{digest}").unlink()
    with pytest.raises(StoreError, match=rf"snapshot-partitions/.*{digest}.*missing.*restore"):
        reader.ask(lambda state: state.tenant("t3"))
    (manifest,) = (tmp_path / "snapshots").iterdir()
    manifest.write_text('{"schema": 2}')
    with pytest.raises(StoreRefused, match=r"newer release.*upgrade"):
        CatalogReader(LocalStore(tmp_path)).refresh()
    manifest.unlink()
    assert CatalogReader(LocalStore(tmp_path)).refresh() == catalog.reader.state
