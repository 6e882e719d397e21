"""A gateway's view of the catalog: its delay, and its behaviour while the store is unreachable."""

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreError, Unavailable
from lorikeet.gateway import catalog_view as module
from lorikeet.gateway.app import create_app
from lorikeet.gateway.catalog_view import MIN_GAP_S, GatewayCatalogView
from lorikeet.gateway.services import Services
from tests.gateway.conftest import LIMITS, Gateway, ReplayEngines, chat, serving
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.waiting import eventually, until

HOUR = 3600.0


class CountingReader(CatalogReader):
    """Catalog that counts refreshes, and fails them on demand."""

    reads = 0
    fails = False

    def refresh(self) -> CatalogState:
        self.reads += 1
        if self.fails:
            raise StoreError("the store is away")
        return super().refresh()


@pytest.fixture
def reader(tmp_path: Path) -> CountingReader:
    AdapterCatalog.init(LocalStore(tmp_path))
    return CountingReader(LocalStore(tmp_path))


def elsewhere(gateway: Gateway) -> AdapterCatalog:
    """Catalog of another process on the same store."""
    return AdapterCatalog(LocalStore(gateway.folder / "store"))


def test_a_key_and_an_adapter_made_elsewhere_work_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, refresh_s=HOUR) as gateway:
        other = elsewhere(gateway)
        other.create_tenant("initech", actor="test")
        _, gateway.keys["initech"] = other.create_key("initech", {Scope.INFER}, actor="test")
        other.promote("acme", "support", 1, "next", actor="test")
        assert gateway.post(CHAT, chat("tiny"), tenant="initech").status_code == 200
        assert gateway.post(CHAT, chat("acme/support@next")).status_code == 200


def test_a_revocation_elsewhere_takes_effect_within_the_interval(tmp_path: Path) -> None:
    with serving(tmp_path, refresh_s=0.05) as gateway:
        assert gateway.post(CHAT, chat()).status_code == 200
        elsewhere(gateway).retire("acme", "support", actor="test")
        assert eventually(lambda: gateway.post(CHAT, chat()).status_code == 404)


def test_a_version_registered_on_a_gateway_is_served_there_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, refresh_s=HOUR) as gateway:
        gateway.register("globex/new", seed=3)
        assert gateway.post(CHAT, chat("globex/new"), tenant="globex").status_code == 200
        gateway.admin("POST", "/adapters/globex/new/retire")
        assert gateway.post(CHAT, chat("globex/new"), tenant="globex").status_code == 404


def test_an_outage_of_the_store_leaves_the_last_view_in_force(tmp_path: Path) -> None:
    with serving(tmp_path, refresh_s=0.05) as gateway:
        store = gateway.folder / "store"
        store.rename(gateway.folder / "away")
        store.touch()  # a file in the place of the folder makes reads fail
        time.sleep(0.2)
        assert gateway.post(CHAT, chat()).status_code == 200
        unknown = gateway.post(CHAT, chat("acme/absent"))
        assert error_of(unknown, 503)["code"] == "unavailable"
        assert "retry-after" in unknown.headers
        unknown = gateway.request("GET", "/v1/models", "lk_made-elsewhere")
        assert error_of(unknown, 503)["code"] == "unavailable"
        failed = gateway.admin("POST", "/tenants", {"tenant": "hooli"})
        assert error_of(failed, 503)["code"] == "store_error"


def test_a_refresh_raises_unavailable_while_the_store_hangs(
    reader: CountingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.gateway.catalog_view.LONGEST_WAIT_S", 0.05)
    answers = threading.Event()
    monkeypatch.setattr(reader, "refresh", lambda: answers.wait(20))

    async def look() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        with pytest.raises(Unavailable):
            await catalog_view.refresh_or_raise()
        assert await catalog_view.refresh() is catalog_view.state
        monkeypatch.setattr("lorikeet.gateway.catalog_view.LONGEST_WAIT_S", 20.0)
        answers.set()
        await catalog_view.refresh_or_raise()

    asyncio.run(look())


class SlowParts(CountingReader):
    """Catalog that counts reads of partitions, which block until released."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.part_reads = 0
        self.goes = threading.Event()

    def read(self, numbers: Collection[int]) -> None:
        self.part_reads += 1
        assert self.goes.wait(10)
        super().read(numbers)


def test_partitions_are_read_off_the_loop_and_once_for_all_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = AdapterCatalog.init(LocalStore(tmp_path))
    writer.create_tenant("acme", actor="test")
    writer.reader.snapshot()
    reader = SlowParts(LocalStore(tmp_path))
    reader.refresh()
    monkeypatch.setattr("lorikeet.gateway.catalog_view.LONGEST_WAIT_S", 0.1)

    async def ask() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        with pytest.raises(Unavailable):  # refreshes still run
            await catalog_view.ask(lambda state: state.tenant("acme"))
        assert (await catalog_view.refresh()).seq == 2
        monkeypatch.setattr("lorikeet.gateway.catalog_view.LONGEST_WAIT_S", 20.0)
        asking = [catalog_view.ask(lambda state: state.tenant("acme")) for _ in range(50)]
        answers = asyncio.gather(*asking)
        await asyncio.sleep(0.05)
        reader.goes.set()
        assert {tenant.name for tenant in await answers} == {"acme"}

    asyncio.run(ask())
    assert reader.part_reads == 1


def test_a_partition_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    writer = AdapterCatalog.init(LocalStore(tmp_path))
    writer.create_tenant("acme", actor="test")
    writer.reader.snapshot()
    reader = CatalogReader(LocalStore(tmp_path))
    reader.refresh()

    async def ask() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        (tmp_path / "snapshot-partitions").rename(tmp_path / "away")
        with pytest.raises(Unavailable):
            await catalog_view.ask(lambda state: state.tenant("acme"))
        (tmp_path / "away").rename(tmp_path / "snapshot-partitions")
        assert (await catalog_view.ask(lambda state: state.tenant("acme"))).name == "acme"

    asyncio.run(ask())


def test_an_unknown_name_is_not_looked_up_again_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, refresh_s=HOUR) as gateway:
        reads: list[float] = []
        refresh = gateway.catalog.reader.refresh

        def count() -> CatalogState:
            reads.append(time.monotonic())
            return refresh()

        gateway.catalog.reader.refresh = count  # type: ignore[method-assign]
        for _ in range(5):
            assert gateway.post(CHAT, chat("acme/absent")).status_code == 404
        assert len(reads) == 1
        assert gateway.post(CHAT, chat("acme/another")).status_code == 404
        assert len(reads) == 2


def test_unknown_keys_share_reads_of_the_catalog_and_known_keys_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.gateway.catalog_view.LONGEST_WAIT_S", 60.0)
    came, refresh_or_raise = list[str](), GatewayCatalogView.refresh_or_raise

    async def counted(view: GatewayCatalogView) -> CatalogState:
        came.append("an unknown key")
        return await refresh_or_raise(view)

    monkeypatch.setattr(GatewayCatalogView, "refresh_or_raise", counted)
    with serving(tmp_path, refresh_s=HOUR) as gateway, ThreadPoolExecutor(40) as flood:
        answers, reads = threading.Event(), list[float]()
        refresh = gateway.catalog.reader.refresh

        def count_late() -> CatalogState:
            reads.append(time.monotonic())
            assert answers.wait(60)
            return refresh()

        gateway.catalog.reader.refresh = count_late  # type: ignore[method-assign]
        keys = [f"lk_{number:043}" for number in range(40)]
        refused = [flood.submit(gateway.request, "GET", "/v1/models", key) for key in keys]
        assert eventually(lambda: bool(reads) and len(came) == len(keys), within_s=30)
        assert gateway.post(CHAT, chat("tiny")).status_code == 200
        answers.set()
        assert {each.result().status_code for each in refused} == {401}
        assert len(reads) <= 2  # one for the first call, one for all calls during it


def test_many_misses_share_one_read(reader: CountingReader) -> None:
    async def miss_together() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        await asyncio.gather(*(catalog_view.refresh() for _ in range(100)))

    asyncio.run(miss_together())
    assert reader.reads == 1


def test_unknown_names_cannot_hammer_the_store(reader: CountingReader) -> None:
    async def miss_for(duration_s: float) -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        until = time.monotonic() + duration_s
        while time.monotonic() < until:
            await catalog_view.refresh()

    asyncio.run(miss_for(5 * MIN_GAP_S))
    assert 1 <= reader.reads <= 6


def test_a_refresh_sees_entries_written_before_the_call(reader: CountingReader) -> None:
    other = AdapterCatalog(reader.store)

    async def write_and_look() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        for number in range(4):
            early = asyncio.create_task(catalog_view.refresh())
            await asyncio.sleep(0.01 * number)
            await asyncio.to_thread(other.create_tenant, f"tenant-{number}", actor="test")
            assert (await catalog_view.refresh()).tenant_state(f"tenant-{number}") is not None
            await early

    asyncio.run(write_and_look())


def test_an_outages_begin_and_end_are_logged_once_each(
    reader: CountingReader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def live_through() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        reader.fails = True
        for _ in range(3):
            await catalog_view.refresh()
        reader.fails = False
        for _ in range(2):
            await catalog_view.refresh()

    asyncio.run(live_through())
    assert [record.msg for record in caplog.records if record.name.startswith("lorikeet")] == [
        "catalog_unreachable",
        "catalog_reachable",
    ]


@pytest.mark.parametrize("has_view", [True, False])
def test_without_any_view_an_outage_is_logged_again_with_what_is_awaited(
    reader: CountingReader,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_view: bool,
) -> None:
    monkeypatch.setattr(module, "REMINDER_S", 0.0)

    async def live_through() -> None:
        catalog_view = GatewayCatalogView(reader, HOUR)
        if has_view:
            await catalog_view.refresh()
        reader.fails = True
        for _ in range(3):
            await catalog_view.refresh()

    asyncio.run(live_through())
    logged = [record for record in caplog.records if record.msg == "catalog_unreachable"]
    assert len(logged) == (1 if has_view else 3)
    assert all("503 until" in getattr(each, "waits", "") for each in logged) == (not has_view)


def test_following_goes_on_after_an_outage(reader: CountingReader) -> None:
    async def follow() -> None:
        catalog_view = GatewayCatalogView(reader, 0.01)
        reader.fails = True
        following = asyncio.create_task(catalog_view.follow())
        await until(lambda: reader.reads > 1)
        reader.fails = False
        await until(lambda: catalog_view.state.seq == 1, within_s=20)
        following.cancel()

    asyncio.run(follow())


def test_a_gateway_without_a_catalog_does_not_start(tmp_path: Path) -> None:
    services = Services(AdapterCatalog(LocalStore(tmp_path)), {}, LIMITS, ReplayEngines())

    async def start() -> None:
        app = create_app(services)
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(StoreError, match="lorikeet init"):
        asyncio.run(start())
