"""The controller while the store is away: it goes on with what was last known of the catalog."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreError
from lorikeet.serving import controller as controller_module
from lorikeet.serving import replica_reconciler
from lorikeet.serving.controller import Controller
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from tests.placement.builders import report
from tests.serving.test_replica_reconciler import Replicas

DIGEST = "a" * 64


class CuttableStore(LocalStore):
    """A store that tests take away: it fails at once, or hangs until it is back."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fails = False
        self.answers = threading.Event()
        self.answers.set()

    def first(self, prefix: str, start_after: str = "") -> str | None:
        self._check()
        return super().first(prefix, start_after)

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        self._check()
        return super().list(prefix, start_after)

    def _check(self) -> None:
        self.answers.wait(20)
        if self.fails:
            raise StoreError("the store does not answer")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env({"LORIKEET_CACHE_DIR": str(tmp_path / "cache")})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CuttableStore:
    store = CuttableStore(tmp_path / "store")
    monkeypatch.setattr(controller_module, "open_store", lambda _url: store)
    monkeypatch.setattr(controller_module, "TICK_S", 0.02)
    monkeypatch.setattr(controller_module, "SURVEY_S", 0.02)
    monkeypatch.setattr(controller_module, "_STORE_S", 0.1)
    return store


@pytest.fixture
def catalog(store: CuttableStore, settings: Settings, tmp_path: Path) -> AdapterCatalog:
    """With one adapter, which is pinned; gateways of this machine have kept it."""
    catalog = AdapterCatalog.init(store)
    catalog.create_tenant("acme", actor="test")
    (tmp_path / "blob").write_bytes(b"weights")
    facts = BlobFacts(DIGEST, 7, 8, "lorikeet-demo", 7)
    catalog.register("acme", "support", tmp_path / "blob", facts, actor="test")
    catalog.pin("acme", "support", tier=Residency.GPU, actor="test")
    KeptView(settings.cache_dir, store.url).write(catalog.state)
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
        for task in (controller._task, controller._snapshots, controller._joins):
            task.cancel()

    asyncio.run(run())


async def pinned_on(replicas: Replicas, name: str) -> None:
    """Return once a replica is told to keep the pinned adapter."""
    async with asyncio.timeout(5):
        while not any(to == name and DIGEST in each.pins for to, each in replicas.received):
            await asyncio.sleep(0.01)


def test_one_that_starts_goes_by_the_view_that_its_machine_kept(
    settings: Settings, store: CuttableStore, catalog: AdapterCatalog, replicas: Replicas
) -> None:
    store.fails = True
    controlled(settings, lambda: pinned_on(replicas, "p"))


def test_without_a_view_it_sends_nothing_until_the_store_is_back(
    settings: Settings, store: CuttableStore, catalog: AdapterCatalog, replicas: Replicas
) -> None:
    KeptView(settings.cache_dir, store.url).path.unlink()
    store.fails = True

    async def watch() -> None:
        await asyncio.sleep(0.3)
        assert replicas.received == []  # which would unpin what they hold
        store.fails = False
        await pinned_on(replicas, "p")

    controlled(settings, watch)


@pytest.mark.parametrize("hangs", [False, True])
def test_replicas_that_come_meanwhile_get_their_pins(
    settings: Settings, store: CuttableStore, catalog: AdapterCatalog, replicas: Replicas, hangs
) -> None:
    async def watch() -> None:
        await pinned_on(replicas, "p")
        store.fails = True
        if hangs:
            store.answers.clear()
        await asyncio.sleep(0.1)
        replicas.reports["q"] = report("q", base_model="lorikeet-demo")
        await pinned_on(replicas, "q")
        store.answers.set()

    controlled(settings, watch)
