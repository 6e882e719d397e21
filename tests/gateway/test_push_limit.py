"""A tenant's pushes in a gateway are limited, those being received included."""

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
from lorikeet.gateway.pushing import push_pipeline
from lorikeet.gateway.pushing.push_pipeline import PushPipeline
from lorikeet.gateway.pushing.pushed_versions import PushedVersion
from lorikeet.gateway.services import ServedModel, Services
from tests.gateway.conftest import LIMITS, SHAPE, ReplayEngines


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PushPipeline:
    monkeypatch.setattr(push_pipeline, "MOST_OF_TENANT", 2)
    catalog = AdapterCatalog.init(LocalStore(tmp_path))
    services = Services(catalog, {"tiny": ServedModel(SHAPE)}, LIMITS, ReplayEngines())
    return PushPipeline(services, GatewayCatalogView(catalog.reader, 60.0))


def version(letter: str, tenant: str = "acme") -> PushedVersion:
    return PushedVersion(tenant, "policy", BlobFacts(letter * 64, 4, 2, "tiny", 8), None, 1.0)


def test_bodies_that_are_being_received_count(pipeline: PushPipeline) -> None:
    with ExitStack() as bodies:
        for letter in "ab":
            bodies.enter_context(pipeline.receiving(version(letter).key))
        with pytest.raises(Overloaded), pipeline.receiving(version("c").key):
            pass
        with pipeline.receiving(version("c", "globex").key):
            pass
    with pipeline.receiving(version("c").key):
        pass


def test_a_version_in_the_pipeline_can_be_pushed_again_at_the_limit(pipeline: PushPipeline) -> None:
    async def push() -> None:
        for letter in "ab":
            pipeline.begin(version(letter), tempfile.TemporaryDirectory())
        again = version("a").key
        with (
            pipeline.receiving(again),
            pipeline.receiving(again),
            pytest.raises(Overloaded),
            pipeline.receiving(again),
        ):
            pass
        with pytest.raises(Overloaded), pipeline.receiving(version("c").key):
            pass

    asyncio.run(push())
