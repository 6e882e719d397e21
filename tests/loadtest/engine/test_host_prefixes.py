from dataclasses import replace

import pytest

from loadtest.engine import host_prefixes
from lorikeet_engine.scheduling.host_pages import HostPages
from tests.engine.tiny_engine import SETTINGS, tiny_engine

PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # of two layers


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(host_prefixes, "CACHED", 64)
    monkeypatch.setattr(host_prefixes, "TURNS", 1)
    monkeypatch.setattr(host_prefixes, "STREAMS", 2)
    monkeypatch.setattr(host_prefixes, "STEPS", 60)
    monkeypatch.setattr(HostPages, "pays", lambda *_: True)
    settings = replace(SETTINGS, kv_bytes=40 * PAGE_BYTES, kv_host_bytes=4 << 20)
    engine = tiny_engine(tmp_path, settings=settings)
    yield engine
    engine.close()


def test_prefixes_on_the_gpu_on_the_host_and_computed_are_timed(engine):
    rows = list(host_prefixes.first_tokens(engine))
    assert [row.prefix for row in rows] == ["not cached", "on the GPU", "on the host"]
    assert all(row.ms > 0 for row in rows)
    gaps = list(host_prefixes.gaps(engine))
    assert [row.requests for row in gaps] == [0, 6, 6]


def test_wrong_tokens_behind_a_prefix_from_the_host_are_not_timed(engine, monkeypatch):
    monkeypatch.setattr(host_prefixes.plain, "check", lambda *_: pytest.fail("checked"))
    with pytest.raises(pytest.fail.Exception, match="checked"):
        next(host_prefixes.first_tokens(engine))


def test_prefixes_that_are_computed_again_are_not_timed_as_the_hosts(engine, monkeypatch):
    monkeypatch.setattr(HostPages, "pays", lambda *_: False)
    with pytest.raises(AssertionError, match="does not come from the host"):
        next(host_prefixes.first_tokens(engine))
