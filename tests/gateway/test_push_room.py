"""A tenant has so many pushes on their way at a gateway, those being received among them."""

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import Overloaded
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.pushing import push_lane
from lorikeet.gateway.pushing.push_lane import PushLane
from lorikeet.gateway.pushing.pushed_versions import PushedVersion
from lorikeet.gateway.services import ServedModel, Services
from tests.gateway.conftest import LIMITS, SHAPE, ReplayEngines


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PushLane:
    monkeypatch.setattr(push_lane, "MOST_OF_TENANT", 2)
    catalog = AdapterCatalog.init(LocalStore(tmp_path))
    services = Services(catalog, {"tiny": ServedModel(SHAPE)}, LIMITS, ReplayEngines())
    return PushLane(services, GatewayCatalogView(catalog.reader, 60.0))


def version(letter: str, tenant: str = "acme") -> PushedVersion:
    return PushedVersion(tenant, "policy", BlobFacts(letter * 64, 4, 2, "tiny", 8), None, 1.0)


def test_bodies_that_are_being_received_count(lane: PushLane) -> None:
    with ExitStack() as bodies:
        for letter in "ab":
            bodies.enter_context(lane.receiving(version(letter).key))
        with pytest.raises(Overloaded), lane.receiving(version("c").key):
            pass
        with lane.receiving(version("c", "globex").key):
            pass
    with lane.receiving(version("c").key):
        pass


def test_there_is_room_for_what_is_carried_already(lane: PushLane) -> None:
    async def push() -> None:
        for letter in "ab":
            lane.begin(version(letter), "key", tempfile.TemporaryDirectory())
        again = version("a").key
        with (
            lane.receiving(again),
            lane.receiving(again),
            pytest.raises(Overloaded),
            lane.receiving(again),
        ):
            pass
        with pytest.raises(Overloaded), lane.receiving(version("c").key):
            pass

    asyncio.run(push())
