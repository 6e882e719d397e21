"""Start of a gateway while the store is unreachable, with and without a saved view."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreRefused
from lorikeet.gateway.app import create_app
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import ServedModel, Services
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, chat, encoders_of, listening, serving
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.remote_store import RemoteStore
from tests.waiting import eventually


class RefusingStore(LocalStore):
    """A store that refuses our credentials."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        raise StoreRefused("the credentials are refused: renew them")


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    return RemoteStore(tmp_path / "store")


@pytest.fixture
def before(tmp_path: Path, store: RemoteStore) -> Iterator[Gateway]:
    """A gateway that keeps running and saves its view while others start."""
    with serving(tmp_path, store, refresh_s=0.05, kept_view=kept(tmp_path)) as gateway:
        yield gateway


def kept(folder: Path) -> KeptView:
    return KeptView(folder / "cache", "the store")


@contextmanager
def started(before: Gateway, store: RemoteStore, kept_view: KeptView | None) -> Iterator[Gateway]:
    catalog = AdapterCatalog(store)
    base_models = {"tiny": ServedModel(SHAPE)}
    parts = catalog, base_models, LIMITS, before.engines, encoders_of(before.engines)
    services = Services(*parts, refresh_s=0.05, kept_view=kept_view)
    with listening(create_app(services)) as url:
        yield replace(before, url=url, catalog=catalog)


def keeps_all(gateway: Gateway) -> bool:
    found = kept(gateway.folder).read()
    return found is not None and found.state.seq == gateway.catalog.reader.state.seq


def test_without_a_view_a_gateway_refuses_until_the_store_is_back(
    before: Gateway, store: RemoteStore
) -> None:
    with ExitStack() as running:
        with store.away():
            gateway = running.enter_context(started(before, store, None))
            refused = gateway.post(CHAT, chat())
            assert error_of(refused, 503)["code"] == "unavailable"
            assert refused.headers["retry-after"] == "5"
            assert gateway.request("GET", "/healthz", None).status_code == 200
            assert gateway.request("GET", "/readyz", None).headers["retry-after"] == "5"
        assert eventually(lambda: gateway.post(CHAT, chat()).status_code == 200)
        assert gateway.request("GET", "/readyz", None).status_code == 200


def test_without_a_view_a_gateway_does_not_start_if_the_store_refuses(before: Gateway) -> None:
    view = refused_view(before, KeptView(before.folder / "cache", "never kept"))
    with pytest.raises(StoreRefused, match="renew them"):
        asyncio.run(view.start())


def test_with_a_view_a_gateway_starts_though_the_store_refuses(before: Gateway) -> None:
    assert eventually(lambda: keeps_all(before))
    view = refused_view(before, kept(before.folder))
    asyncio.run(view.start())
    assert view.state.seq == before.catalog.reader.state.seq


def refused_view(before: Gateway, kept_view: KeptView) -> GatewayCatalogView:
    catalog = AdapterCatalog(RefusingStore(before.folder / "store"))
    return GatewayCatalogView(catalog.reader, 1.0, kept_view)


def test_with_a_view_a_gateway_serves_and_reports_the_views_age(
    before: Gateway, store: RemoteStore
) -> None:
    before.register("globex/other", seed=3)
    before.catalog.revoke_key(key_id(before, "globex"), actor="test")
    assert eventually(lambda: keeps_all(before))
    an_hour_old = KeptView(before.folder / "cache", "an hour old")
    an_hour_old.write(before.catalog.reader.state)
    os.utime(an_hour_old.path, (time.time() - 3600,) * 2)
    with store.away(), started(before, store, an_hour_old) as gateway:
        assert gateway.post(CHAT, chat()).status_code == 200
        assert gateway.request("GET", "/v1/models", gateway.keys["globex"]).status_code == 401
        assert error_of(gateway.post(CHAT, chat("acme/absent")), 503)["code"] == "unavailable"
        assert status(gateway)["catalog_age_s"] >= 3600
        assert status(gateway)["catalog_seq"] == before.catalog.reader.state.seq
        assert "lorikeet_catalog_age_seconds" in metrics(gateway)


def test_an_old_view_follows_the_log_once_the_store_is_back(
    before: Gateway, store: RemoteStore
) -> None:
    assert eventually(lambda: keeps_all(before))
    old = kept(before.folder).read()
    assert old is not None
    before.catalog.create_tenant("initech", actor="test")
    path = KeptView(before.folder / "cache", "old")
    path.write(old.state)
    with started(before, store, path) as gateway:
        assert eventually(lambda: status(gateway)["catalog_seq"] == before.catalog.reader.state.seq)
        assert status(gateway)["catalog_age_s"] < 5


def key_id(gateway: Gateway, tenant: str) -> str:
    (key,) = gateway.catalog.reader.ask(lambda state: state.keys(tenant))
    return key.id


def status(gateway: Gateway) -> dict[str, float]:
    said: dict[str, float] = gateway.admin("GET", "/status").raise_for_status().json()
    return said


def metrics(gateway: Gateway) -> str:
    return gateway.request("GET", "/metrics", gateway.admin_key).text
