"""Concurrent administrators: every update is committed or refused, none is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.log import Log
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope, VersionRecord
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import Conflict, StoreError
from tests.waiting import eventually

Register = Callable[..., VersionRecord]


def catalogs(store: ObjectStore, count: int) -> list[AdapterCatalog]:
    """Make catalogs that share only the store, as if each had its own process."""
    return [AdapterCatalog(store) for _ in range(count)]


class SlowToFail(LocalStore):
    """Store that does not answer, so that its client fails after SILENT_S."""

    SILENT_S = 0.3
    asked = 0

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        self.asked += 1
        self.before_it_fails()
        time.sleep(self.SILENT_S)
        raise StoreError("no answer")

    def before_it_fails(self) -> None:
        """Do nothing; tests replace it."""


def test_writers_that_wait_for_each_other_fail_together(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.reader.refresh()
    store, begun = SlowToFail(tmp_path), list[int]()
    store.before_it_fails = lambda: eventually(lambda: len(begun) == 8, 20)  # type: ignore[assignment]
    catalog.reader.log = Log(store)

    def write(number: int) -> None:
        begun.append(number)
        with pytest.raises(StoreError, match="no answer"):
            catalog.create_tenant(f"t{number}", actor="a")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert store.asked <= 3  # one; a busy machine may let a writer come late


def test_a_store_that_recovers_is_asked_by_callers_that_waited_through_its_failure(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    asked_s, working = time.monotonic(), catalog.reader.log
    catalog.reader.log = Log(SlowToFail(tmp_path))
    with pytest.raises(StoreError, match="no answer"):
        catalog.reader.refresh()
    catalog.reader.log = working
    catalog.reader.refresh()
    assert catalog.reader.refresh(asked_s) == catalog.reader.state


def test_threads_that_change_everything_lose_nothing(
    catalog: AdapterCatalog, store: ObjectStore
) -> None:
    def change(writer: tuple[int, AdapterCatalog]) -> list[str]:
        number, own = writer
        keys = [own.create_key("acme", [Scope.INFER], actor=f"w{number}")[0].id for _ in range(5)]
        own.create_tenant(f"t{number}", actor=f"w{number}")
        own.revoke_key(keys[0], actor=f"w{number}")
        return keys

    with ThreadPoolExecutor(4) as threads:
        keys = list(threads.map(change, enumerate(catalogs(store, 4))))

    state = catalog.reader.refresh()
    records = state.keys()
    assert {key.id for key in records} == {key for own in keys for key in own}
    assert {key.id for key in records if key.revoked} == {own[0] for own in keys}
    assert [tenant.name for tenant in state.tenants()] == ["acme", "t0", "t1", "t2", "t3"]
    assert [entry.seq for entry in Log(store).read(0)] == list(range(1, state.seq + 1))


def test_of_promotions_with_the_same_expectation_exactly_one_succeeds(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    for number in range(9):
        register("acme/support", str(number).encode())

    def promote(writer: tuple[int, AdapterCatalog]) -> int | None:
        version, own = writer
        try:
            own.promote("acme", "support", version, expect=1, actor=f"w{version}")
        except Conflict:
            return None
        return version

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(promote, enumerate(catalogs(store, 8), start=2)))

    won = [version for version in outcomes if version is not None]
    record = catalog.reader.refresh().adapter("acme", "support")
    assert len(won) == 1
    assert record.aliases == {"prod": won[0]}
    assert record.alias_history == {"prod": (1,)}


def test_concurrent_registrations_of_one_blob_make_one_version(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    with ThreadPoolExecutor(6) as threads:
        versions = list(threads.map(lambda _: register("acme/support", b"same"), range(6)))

    assert {version.version for version in versions} == {1}
    assert len(catalog.reader.refresh().adapter("acme", "support").versions) == 1


def test_readers_see_complete_states_that_never_go_back(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    reader = CatalogReader(store)
    reader.refresh()
    done = threading.Event()

    def read(refreshes: bool) -> int:
        seen = 0
        while not done.is_set():
            state = reader.refresh() if refreshes else reader.state
            assert state.seq >= seen
            seen = state.seq
            for record in state.adapters():
                # a registration and its promotion are one entry
                assert record.aliases["prod"] == len(record.versions)
            done.wait(0.002)
        return seen

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read, refreshes) for refreshes in (True, True, False, False)]
        for number in range(20):
            register("acme/support", str(number).encode(), promote=True)
        done.set()
        last = [reading.result() for reading in readers]

    assert max(last) <= catalog.reader.state.seq
    assert reader.refresh() == catalog.reader.state


class Overtaken(LocalStore):
    """Local store in which a rival always commits first."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        if key.startswith("log/"):
            rival = AdapterCatalog(LocalStore(Path(self.url)))
            rival.create_tenant(f"rival-{rival.reader.refresh().seq}", actor="eve")
        super().put_if_absent(key, data)


def test_a_writer_that_loses_every_race_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AdapterCatalog.init(LocalStore(tmp_path))
    monkeypatch.setattr("lorikeet.catalog.catalog._ATTEMPTS", 3)

    with pytest.raises(Conflict, match="3 times in a row: try again later"):
        AdapterCatalog(Overtaken(tmp_path)).create_tenant("late", actor="ann")
    state = CatalogReader(LocalStore(tmp_path)).refresh()
    assert [tenant.name for tenant in state.tenants()] == ["rival-1", "rival-2", "rival-3"]
