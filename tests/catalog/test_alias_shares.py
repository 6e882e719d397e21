"""Aliases that give a share of their requests to a second version."""

from collections.abc import Callable

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import VersionRecord
from lorikeet.errors import Conflict, InvalidInput, NotFound

Register = Callable[..., VersionRecord]
SESSIONS = [f"session-{number}" for number in range(4000)]


@pytest.fixture
def store_url(tmp_path: object) -> str:
    return f"{tmp_path}/store"


@pytest.fixture
def shared(catalog: AdapterCatalog, register: Register) -> AdapterCatalog:
    """Catalog in which prod is version 1 and version 2 gets a tenth of the requests."""
    for number in range(3):
        register("acme/support", str(number).encode())
    catalog.give_share("acme", "support", 2, 0.1, actor="ann")
    return catalog


def seen(catalog: AdapterCatalog, model: str = "acme/support") -> dict[str, int]:
    return {each: catalog.reader.state.resolve(model, "acme", each).version for each in SESSIONS}


def test_a_share_is_as_large_as_promised(shared: AdapterCatalog) -> None:
    second = sum(version == 2 for version in seen(shared).values())
    assert 320 < second < 480  # 400 ± 4 standard deviations of 19


def test_a_session_stays_with_its_version_while_the_share_grows(shared: AdapterCatalog) -> None:
    few = {each for each, version in seen(shared).items() if version == 2}
    assert seen(shared) == seen(shared)
    shared.give_share("acme", "support", 2, 0.5, actor="ann")
    many = {each for each, version in seen(shared).items() if version == 2}
    assert few < many
    assert 1870 < len(many) < 2130


def test_sessions_with_the_second_version_differ_between_adapters(
    shared: AdapterCatalog, register: Register
) -> None:
    for number in range(2):
        register("acme/other", str(number).encode())
    shared.give_share("acme", "other", 2, 0.1, actor="ann")
    mine = {each for each, version in seen(shared).items() if version == 2}
    theirs = {each for each, version in seen(shared, "acme/other").items() if version == 2}
    assert len(mine & theirs) < 80  # 40 ± 4 standard deviations of 6, and far from 400


def test_without_a_session_the_first_version_is_selected(shared: AdapterCatalog) -> None:
    assert shared.reader.state.resolve("acme/support", "acme").version == 1


def test_promoting_either_version_ends_a_share(shared: AdapterCatalog) -> None:
    shared.promote("acme", "support", 2, expect=1, actor="ann")
    record = shared.reader.state.adapter("acme", "support")
    assert (record.aliases, record.shares) == ({"prod": 2}, {})
    assert set(seen(shared).values()) == {2}

    shared.give_share("acme", "support", 3, 0.1, actor="ann")
    shared.promote("acme", "support", 2, actor="ann")
    assert set(seen(shared).values()) == {2}


def test_a_rollback_ends_the_share_first(shared: AdapterCatalog) -> None:
    shared.promote("acme", "support", 2, actor="ann")
    shared.give_share("acme", "support", 3, 0.1, actor="ann")

    assert shared.rollback("acme", "support", actor="ann").shares == {}
    assert set(seen(shared).values()) == {2}
    assert shared.rollback("acme", "support", actor="ann").aliases == {"prod": 1}


def test_an_impossible_share_is_refused(shared: AdapterCatalog) -> None:
    with pytest.raises(Conflict, match="already points to version 1"):
        shared.give_share("acme", "support", 1, 0.1, actor="ann")
    with pytest.raises(NotFound, match="no alias 'canary'"):
        shared.give_share("acme", "support", 2, 0.1, "canary", actor="ann")
    with pytest.raises(Conflict, match="points to version 1, not to version 3"):
        shared.give_share("acme", "support", 2, 0.1, expect=3, actor="ann")
    with pytest.raises(Conflict, match="2 is prod"):
        shared.retire("acme", "support", 2, actor="ann")
    for part in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(InvalidInput, match="want more than 0"):
            shared.give_share("acme", "support", 2, part, actor="ann")
    seq = shared.reader.state.seq
    shared.give_share("acme", "support", 2, 0.1, actor="ann")
    assert shared.reader.state.seq == seq
