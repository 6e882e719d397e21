"""Time until a revoked key ends on other gateways, which only follow the catalog."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.gateway import auth
from lorikeet.gateway.app import create_app
from lorikeet.gateway.services import Services
from tests.gateway.conftest import LIMITS, Gateway, ReplayEngines, listening, serving
from tests.moved_time import MovedTime

BOUND_S = 5.0

Ask = Callable[[str], int]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Gateway, Ask]]:
    """A gateway, and another's answers to a key on the same store, both as in production."""
    with serving(tmp_path) as first:
        store = LocalStore(tmp_path / "store")
        services = Services(AdapterCatalog(store), {}, LIMITS, ReplayEngines())
        with listening(create_app(services)) as url:

            def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return httpx.get(f"{url}/v1/models", headers=headers).status_code

            yield first, ask


def test_a_key_revoked_at_one_gateway_ends_at_another_within_5_s(
    two: tuple[Gateway, Ask],
) -> None:
    gateway, ask = two
    made = gateway.admin("POST", "/tenants/acme/keys", {}).json()
    assert ask(made["key"]) == 200
    gateway.admin("DELETE", f"/keys/{made['id']}").raise_for_status()
    began = time.monotonic()
    assert gateway.request("GET", "/v1/models", made["key"]).status_code == 401
    while ask(made["key"]) == 200:
        assert time.monotonic() - began < BOUND_S
        time.sleep(0.05)
    assert ask(made["key"]) == 401


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> MovedTime:
    """Clock by which gateways judge keys, which a test moves."""
    return MovedTime(monkeypatch, auth)


def test_a_rotated_key_and_its_successor_work_at_another_until_the_overlap_ends(
    two: tuple[Gateway, Ask], moved: MovedTime
) -> None:
    gateway, ask = two
    old = gateway.admin("POST", "/tenants/acme/keys", {"name": "ci"}).json()
    new = gateway.admin("POST", f"/keys/{old['id']}/rotate", {"overlap_s": 60.0}).json()
    assert (new["name"], new["replaces"]["replaced_by"]) == ("ci", new["id"])
    assert (ask(old["key"]), ask(new["key"])) == (200, 200)
    moved.ahead_s = new["replaces"]["expires"] - time.time()
    assert (ask(old["key"]), ask(new["key"])) == (401, 200)


def test_keys_expire_and_the_last_view_holds_while_the_store_is_unreachable(
    two: tuple[Gateway, Ask], moved: MovedTime, tmp_path: Path
) -> None:
    gateway, ask = two
    ends = time.time() + 60.0
    _, ending = gateway.catalog.create_key("acme", {Scope.INFER}, expires=ends, actor="test")
    assert (ask(ending), ask(gateway.keys["acme"])) == (200, 200)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").touch()  # a file in the place of the folder makes reads fail
    moved.ahead_s = ends - time.time()
    assert ask(ending) == 401
    assert ask(gateway.keys["acme"]) == 200
