"""Fixtures: a shelf of adapters, and tiers and disk caches that fetch from it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.disk.cache import DiskCache
from tests.engine.blobs import Shelf, everywhere
from tests.engine.residency.tiers_driver import TiersDriver

KIND, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf(tmp_path / "remote")


@pytest.fixture
def refs(shelf) -> list[AdapterRef]:
    return [shelf.make(name, everywhere(4)) for name in "abcd"]


@pytest.fixture
def cache(shelf, refs, tmp_path):
    """Return a function that makes caches of one folder. room: budget, in sizes of a blob."""
    size = shelf.blob("a").stat().st_size

    def make(room: float, fingerprint: str = KIND) -> DiskCache:
        return DiskCache(tmp_path / "disk", int(room * size), shelf, fingerprint)

    return make


@pytest.fixture
def bench(shelf, tmp_path) -> Iterator[Callable[..., TiersDriver]]:
    made = []

    def make(gpu: float = 4, host: float = 8, slots: int = 8, **others: Any) -> TiersDriver:
        made.append(TiersDriver(shelf, tmp_path / "cache", gpu, host, slots, **others))
        return made[-1]

    yield make
    for gate in shelf.gates.values():
        gate.set()
    for one in made:
        one.tiers.close()
