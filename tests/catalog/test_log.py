"""Log: one commit point, no gaps, and readers that stop at an unknown format."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.changes import CatalogCreated, Entry, KeyRevoked, TenantCreated
from lorikeet.catalog.log import BLOCK, Log
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import Conflict, StoreError, StoreRefused


class Watched(LocalStore):
    """Local store that records its reads."""

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
    """Local store that loses the answers of writes if absent, or fails before writing."""

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
    second = log.append(1, "bob", 2.5, [TenantCreated(name="a"), KeyRevoked(id="k")])

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
            {"type": "tenant_created", "name": "a"},
            {"type": "key_revoked", "id": "k"},
        ],
        "before": [
            {
                "seq": 1,
                "schema": 1,
                "nonce": first.nonce,
                "actor": "ann",
                "time": 1.5,
                "changes": [{"type": "catalog_created"}],
            }
        ],
    }


def test_a_taken_number_is_a_conflict(store: ObjectStore) -> None:
    log = Log(store)
    first = log.append(0, "ann", 1.0, [CatalogCreated()])

    with pytest.raises(Conflict, match="someone else"):
        log.append(0, "bob", 2.0, [CatalogCreated()])
    assert log.read(0) == [first]


def test_an_append_whose_answer_was_lost_succeeds(tmp_path: Path) -> None:
    entry = Log(Forgetful(tmp_path, writes=True)).append(0, "ann", 1.0, [CatalogCreated()])

    assert Log(LocalStore(tmp_path)).read(0) == [entry]


def test_a_write_that_never_arrived_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="connection was reset"):
        Log(Forgetful(tmp_path, writes=False)).append(0, "ann", 1.0, [CatalogCreated()])

    assert Log(LocalStore(tmp_path)).read(0) == []


def test_a_refresh_reads_only_the_tail_of_the_log(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    writer = AdapterCatalog.init(LocalStore(tmp_path))
    reader = CatalogReader(watched)
    reader.refresh()
    for name in ("a", "b"):
        writer.create_tenant(name, actor="ann")
    watched.reads.clear()

    reader.refresh()
    assert watched.reads == [
        "list log/ after log/000000000000.json",
        "get log/000000000003.json",
    ]

    watched.reads.clear()
    reader.refresh()
    assert watched.reads == ["list log/ after log/000000000002.json"]


NEWER = {"seq": 2, "schema": 1, "nonce": "n", "actor": "a", "time": 1.0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (json.dumps(NEWER | {"schema": 3, "changes": []}), "newer release.*upgrade this one"),
        (json.dumps(NEWER | {"changes": [{"type": "moved_in"}]}), "moved_in.*upgrade this one"),
        (json.dumps(NEWER | {"changes": [{"type": "key_revoked"}]}), "damaged.*restore"),
        (json.dumps(NEWER), "damaged.*restore"),
        ("{}", "not a log entry.*restore"),
        ("[]", "not a log entry.*restore"),
        ('{"seq": 2, "sch', "not a log entry.*restore"),
        ("\x00", "not a log entry.*restore"),
    ],
)
def test_an_unreadable_entry_stops_the_reader_before_it(
    tmp_path: Path, data: str, message: str
) -> None:
    store = LocalStore(tmp_path)
    catalog = AdapterCatalog.init(store)
    store.put_if_absent("log/000000000002.json", data.encode())

    with pytest.raises(StoreError, match=f"log/000000000002.json.*{message}"):
        catalog.reader.refresh()
    with pytest.raises(StoreError):
        catalog.create_tenant("a", actor="ann")
    assert catalog.reader.state.seq == 1


def fill(log: Log, entries: int) -> list[Entry]:
    return [log.append(seq, "ann", 1.0, [CatalogCreated()]) for seq in range(entries)]


def test_a_reader_fetches_one_object_for_each_block(tmp_path: Path) -> None:
    entries = fill(Log(LocalStore(tmp_path)), 2 * BLOCK + 3)
    watched = Watched(tmp_path)

    assert Log(watched).read(5) == entries[5:]
    gets = sorted(read for read in watched.reads if read.startswith("get"))
    assert gets == [f"get log/{seq:012d}.json" for seq in (127, 255, 259)]


def test_a_new_writer_continues_the_block(tmp_path: Path) -> None:
    entries = fill(Log(LocalStore(tmp_path)), 5)
    entries.append(Log(LocalStore(tmp_path)).append(5, "bob", 2.0, [KeyRevoked(id="k")]))
    watched = Watched(tmp_path)

    assert Log(watched).read(0) == entries
    assert watched.reads[1:] == ["get log/000000000006.json"]


def test_large_entries_are_not_repeated_without_end(tmp_path: Path) -> None:
    log = Log(LocalStore(tmp_path))
    many = [KeyRevoked(id=f"key-{number:060d}") for number in range(200)]
    entries = [log.append(seq, "ann", 1.0, many) for seq in range(20)]

    sizes = [path.stat().st_size for path in (tmp_path / "log").iterdir()]
    assert sum(sizes) < 20 * 2**17
    assert Log(LocalStore(tmp_path)).read(0) == entries
    assert Log(LocalStore(tmp_path)).read(7) == entries[7:]


def test_a_lost_object_is_healed_by_the_next_or_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    entries = fill(Log(store), BLOCK + 1)
    store.delete("log/000000000002.json")
    assert Log(store).read(0) == entries

    store.delete(f"log/{BLOCK - 1:012d}.json")
    with pytest.raises(StoreError, match=rf"log/{BLOCK - 1:012d}\.json is missing"):
        Log(store).read(0)


def test_other_objects_beside_the_log_are_ignored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    catalog = AdapterCatalog.init(store)
    store.put_if_absent("log/README", b"hands off")
    store.put_if_absent("log/999.json", b"?")

    assert catalog.create_tenant("a", actor="ann").name == "a"


def test_a_lost_log_is_not_taken_for_an_up_to_date_one(tmp_path: Path) -> None:
    log = Log(LocalStore(tmp_path / "store"))
    log.append(0, "ann", 1.5, [CatalogCreated()])
    assert log.read(1) == []
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreError, match=r"log/000000000001\.json is gone"):
        log.read(1)


def test_an_entry_that_changes_after_it_was_read_is_logged_and_ends_appends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path)
    Log(store).append(0, "init", 1.0, [CatalogCreated()])
    reader, other = Log(store), Log(store)
    mine = reader.append(1, "ann", 2.0, [TenantCreated(name="a")])
    store.delete("log/000000000002.json")  # a store without conditional writes replaces it
    other.append(1, "bob", 2.0, [TenantCreated(name="b")])
    other.append(2, "bob", 3.0, [TenantCreated(name="c")])

    (entry,) = reader.read(mine.seq)

    assert entry.seq == 3  # changes are followed all the same
    (event,) = caplog.records
    assert (event.levelname, event.message) == ("ERROR", "log_entry_overwritten")
    assert vars(event)["entry"] == "log/000000000002.json"
    with pytest.raises(StoreRefused, match=r"000000000002\.json was overwritten"):
        reader.append(3, "ann", 4.0, [TenantCreated(name="d")])
    assert Log(store).append(3, "cat", 4.0, [TenantCreated(name="d")]).seq == 4


def test_a_log_that_nobody_overwrites_is_read_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path)
    writers = Log(store), Log(store)
    for seq in range(2 * BLOCK + 3):
        writers[seq % 2].append(seq, "ann", 1.0, [CatalogCreated()])
        writers[(seq + 1) % 2].read(max(0, seq - 5))
    assert not caplog.records
