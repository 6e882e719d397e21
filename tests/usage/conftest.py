"""Fixtures: a store of either kind, and a clock."""

import uuid
from pathlib import Path

import pytest

from lorikeet.catalog.store.object_store import ObjectStore, open_store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    return open_store(f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}")
