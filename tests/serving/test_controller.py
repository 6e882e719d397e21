"""Controller during an outage of the store."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.records import BlobFacts
from lorikeet.serving import controller as controller_module
from lorikeet.serving import replica_reconciler
from lorikeet.serving.controller import Controller
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from tests.placement.builders import report
from tests.remote_store import RemoteStore
from tests.serving.test_replica_reconciler import Replicas

DIGEST = "a" * 64


class HangingStore(RemoteStore):
    """Store whose calls may also hang until it is back."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answers = threading.Event()
        self.answers.set()

    def _check(self) -> None:
        self.answers.wait(20)
        super()._check()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env({"LORIKEET_CACHE_DIR": str(tmp_path / "cache")})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HangingStore:
    store = HangingStore(tmp_path / "store")
    monkeypatch.setattr(controller_module, "open_store", lambda _url: store)
    monkeypatch.setattr(controller_module, "TICK_S", 0.02)
    monkeypatch.setattr(controller_module, "SURVEY_S", 0.02)
    monkeypatch.setattr(controller_module, "_STORE_TIMEOUT_S", 0.1)
    return store


@pytest.fixture
def catalog(store: HangingStore, settings: Settings, tmp_path: Path) -> AdapterCatalog:
    """Catalog with one pinned adapter; gateways of this machine keep its view."""
    catalog = AdapterCatalog.init(store)
    catalog.create_tenant("acme", actor="test")
    (tmp_path / "blob").write_bytes(b"weights")
    facts = BlobFacts(DIGEST, 7, 8, "lorikeet-demo", 7)
    catalog.register("acme", "support", tmp_path / "blob", facts, actor="test")
    catalog.pin("acme", "support", tier=Residency.GPU, actor="test")
    KeptView(settings.cache_dir, store.url).write(catalog.reader.state)
    return catalog


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    replicas = Replicas()
    replicas.reports["p"] = report("p", base_model="lorikeet-demo")
    monkeypatch.setattr(replica_reconciler, "broadcast", replicas.broadcast)
    return replicas


def controlled(settings: Settings, watch: Callable[[], Awaitable[None]]) -> None:
    """Run a controller until `watch` returns."""

    async def run() -> None:
        controller = Controller(settings, {"lorikeet-demo": None})  # type: ignore[dict-item]
        await watch()
        controller.__del__()

    asyncio.run(run())


async def pinned_on(replicas: Replicas, name: str) -> None:
    """Wait until a replica is told to keep the pinned adapter."""
    async with asyncio.timeout(20):
        while not any(to == name and DIGEST in each.pins for to, each in replicas.received):
            await asyncio.sleep(0.01)


def test_a_controller_that_starts_uses_the_view_that_its_machine_keeps(
    settings: Settings, store: HangingStore, catalog: AdapterCatalog, replicas: Replicas
) -> None:
    store.is_away = True
    controlled(settings, lambda: pinned_on(replicas, "p"))


def test_a_controller_without_a_view_sends_nothing_until_the_store_is_back(
    settings: Settings, store: HangingStore, catalog: AdapterCatalog, replicas: Replicas
) -> None:
    KeptView(settings.cache_dir, store.url).path.unlink()
    store.is_away = True

    async def watch() -> None:
        await asyncio.sleep(0.3)
        assert replicas.received == []  # an empty plan would unpin their adapters
        store.is_away = False
        await pinned_on(replicas, "p")

    controlled(settings, watch)


@pytest.mark.parametrize("hangs", [False, True])
def test_replicas_that_start_during_an_outage_get_their_pins(
    settings: Settings, store: HangingStore, catalog: AdapterCatalog, replicas: Replicas, hangs
) -> None:
    async def watch() -> None:
        await pinned_on(replicas, "p")
        store.is_away = True
        if hangs:
            store.answers.clear()
        await asyncio.sleep(0.1)
        replicas.reports["q"] = report("q", base_model="lorikeet-demo")
        await pinned_on(replicas, "q")
        store.answers.set()

    controlled(settings, watch)


def test_a_controller_that_serve_ends_reads_and_logs_nothing_more(
    settings: Settings,
    store: HangingStore,
    catalog: AdapterCatalog,
    replicas: Replicas,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        controller = Controller(settings, {"lorikeet-demo": None})  # type: ignore[dict-item]
        await pinned_on(replicas, "p")
        controller.__del__()
        await asyncio.sleep(0.2)  # until a read that had begun has ended
        store.is_away = True
        asked = len(replicas.received)
        await asyncio.get_running_loop().shutdown_default_executor()  # as at a process's end
        await asyncio.sleep(0.1)
        assert len(replicas.received) == asked

    asyncio.run(run())
    assert '"level": "error"' not in capfd.readouterr().err


@pytest.mark.parametrize("error", [RayActorError(), RayServeException("the handle is shut down")])
def test_a_deployment_that_ends_is_no_failed_tick(
    settings: Settings,
    store: HangingStore,
    catalog: AdapterCatalog,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    class Ending:
        def broadcast(self, *_: object) -> None:
            raise error

    async def run() -> None:
        controller = Controller(settings, {"lorikeet-demo": Ending()})  # type: ignore[dict-item]
        await asyncio.sleep(0.3)
        controller.check_health()
        controller.__del__()

    asyncio.run(run())
    assert '"level": "error"' not in capfd.readouterr().err
