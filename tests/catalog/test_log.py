"""The log: one commit point, no gaps, and readers that stop where they do not understand."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.catalog import AdapterCatalog, ObjectStore
from lorikeet.catalog.changes import CatalogCreated, KeyRevoked, TenantSaved
from lorikeet.catalog.local import LocalStore
from lorikeet.catalog.log import Log
from lorikeet.errors import Conflict, StoreError


class Watched(LocalStore):
    """A local store that keeps the names of the reads it was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[str] = []

    def get(self, key: str) -> bytes:
        self.reads.append(f"get {key}")
        return super().get(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        self.reads.append(f"list {prefix} after {start_after}")
        return super().list(prefix, start_after)


class Forgetful(LocalStore):
    """A local store whose answers to writes if absent get lost, or that fails before writing."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        super().__init__(folder)
        self._writes = writes

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self._writes:
            super().put_if_absent(key, data)
        raise StoreError("the connection was reset")


def test_entries_come_back_in_order_with_their_author(store: ObjectStore) -> None:
    log = Log(store)
    first = log.append(0, "ann", 1.5, [CatalogCreated()])
    second = log.append(
        1, "bob", 2.5, [TenantSaved(name="a", max_concurrent=None), KeyRevoked(id="k")]
    )

    assert log.read(0) == [first, second]
    assert log.read(1) == [second]
    assert log.read(2) == []
    assert json.loads(store.get("log/000000000002.json")) == {
        "seq": 2,
        "schema": 1,
        "nonce": second.nonce,
        "actor": "bob",
        "time": 2.5,
        "changes": [
            {"type": "tenant_saved", "name": "a", "max_concurrent": None},
            {"type": "key_revoked", "id": "k"},
        ],
    }


def test_a_taken_number_is_a_conflict(store: ObjectStore) -> None:
    log = Log(store)
    first = log.append(0, "ann", 1.0, [CatalogCreated()])

    with pytest.raises(Conflict, match="someone else"):
        log.append(0, "bob", 2.0, [CatalogCreated()])
    assert log.read(0) == [first]


def test_a_lost_answer_to_ones_own_success_is_success(tmp_path: Path) -> None:
    entry = Log(Forgetful(tmp_path, writes=True)).append(0, "ann", 1.0, [CatalogCreated()])

    assert Log(LocalStore(tmp_path)).read(0) == [entry]


def test_a_write_that_never_arrived_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="connection was reset"):
        Log(Forgetful(tmp_path, writes=False)).append(0, "ann", 1.0, [CatalogCreated()])

    assert Log(LocalStore(tmp_path)).read(0) == []


def test_a_refresh_reads_the_tail_and_nothing_else(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    writer = AdapterCatalog.init(LocalStore(tmp_path))
    reader = AdapterCatalog(watched)
    reader.refresh()
    for name in ("a", "b"):
        writer.create_tenant(name, actor="ann")
    watched.reads.clear()

    reader.refresh()
    assert sorted(watched.reads) == [
        "get log/000000000002.json",
        "get log/000000000003.json",
        "list log/ after log/000000000000.json",
    ]

    watched.reads.clear()
    reader.refresh()
    assert watched.reads == ["list log/ after log/000000000002.json"]


NEWER = {"seq": 2, "schema": 1, "nonce": "n", "actor": "a", "time": 1.0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (json.dumps(NEWER | {"schema": 2, "changes": []}), "newer release.*upgrade this one"),
        (json.dumps(NEWER | {"changes": [{"type": "moved_in"}]}), "moved_in.*upgrade this one"),
        (json.dumps(NEWER | {"changes": [{"type": "key_revoked"}]}), "damaged.*restore"),
        (json.dumps(NEWER), "damaged.*restore"),
        ("{}", "not a log entry.*restore"),
        ("[]", "not a log entry.*restore"),
        ('{"seq": 2, "sch', "not a log entry.*restore"),
        ("\x00", "not a log entry.*restore"),
    ],
)
def test_an_entry_that_cannot_be_read_stops_the_reader_where_it_is(
    tmp_path: Path, data: str, message: str
) -> None:
    store = LocalStore(tmp_path)
    catalog = AdapterCatalog.init(store)
    store.put_if_absent("log/000000000002.json", data.encode())

    with pytest.raises(StoreError, match=f"log/000000000002.json.*{message}"):
        catalog.refresh()
    with pytest.raises(StoreError):
        catalog.create_tenant("a", actor="ann")
    assert catalog.state.seq == 1


def test_a_lost_entry_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    catalog = AdapterCatalog.init(store)
    for name in ("a", "b"):
        catalog.create_tenant(name, actor="ann")
    store.delete("log/000000000002.json")

    with pytest.raises(StoreError, match=r"log/000000000002\.json is missing"):
        AdapterCatalog(store).refresh()


def test_strange_objects_beside_the_log_are_passed_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    catalog = AdapterCatalog.init(store)
    store.put_if_absent("log/README", b"hands off")
    store.put_if_absent("log/999.json", b"?")

    assert catalog.create_tenant("a", actor="ann").name == "a"


def test_a_log_that_is_gone_is_not_taken_for_one_without_news(tmp_path: Path) -> None:
    log = Log(LocalStore(tmp_path / "store"))
    log.append(0, "ann", 1.5, [CatalogCreated()])
    assert log.read(1) == []
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreError, match=r"log/000000000001\.json is gone"):
        log.read(1)
