"""A shelf of adapters, and tiers that fetch from it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.blobs import Shelf
from tests.engine.residency.tiers_driver import TiersDriver


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf(tmp_path / "remote")


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
