"""History: the log's entries, the catalog as of a moment, and undoing a retirement."""

from collections.abc import Callable

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.history import HistoryQuery
from lorikeet.catalog.log import BLOCK
from lorikeet.catalog.records import Scope, VersionRecord
from lorikeet.catalog.store.object_store import open_store
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import Conflict, InvalidInput, UnknownModel
from lorikeet_engine.adapter import Residency

Register = Callable[..., VersionRecord]


@pytest.fixture(params=["local"])
def store_url(tmp_path: object) -> str:
    return f"{tmp_path}/store"  # what stores do differently, test_store.py and test_log.py know


def prod(view: CatalogView) -> int:
    return view.ask(lambda state: state.adapter("acme", "support")).aliases["prod"]


def found(catalog: AdapterCatalog, limit: int = 100, **wanted: object) -> list[int]:
    page = catalog.reader.history.find(HistoryQuery(**wanted), limit)  # type: ignore[arg-type]
    return [entry.seq for entry in page.entries]


def test_entries_are_found_by_tenant_adapter_and_actor(
    catalog: AdapterCatalog, register: Register, clock: list[float]
) -> None:
    register("acme/support", b"1")  # 3
    register("acme/other", b"2", actor="bob")  # 4
    catalog.create_tenant("globex", actor="bob")  # 5
    clock[0] = 2000.0
    catalog.pin("acme", "support", actor="bob")  # 6
    key, _ = catalog.create_key("acme", [Scope.INFER], actor="ann")  # 7
    catalog.revoke_key(key.id, actor="ann")  # 8

    assert found(catalog) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert found(catalog, limit=2) == [8, 7]
    assert found(catalog, tenant="acme") == [7, 6, 4, 3, 2]
    assert found(catalog, tenant="acme", name="support") == [6, 3]
    assert found(catalog, tenant="globex") == [5]
    assert found(catalog, actor="bob") == [6, 5, 4]
    assert found(catalog, actor="bob", tenant="acme") == [6, 4]
    assert found(catalog, since=1500.0) == [8, 7, 6]


def test_a_found_entry_shows_only_its_matching_changes(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    (entry,) = catalog.reader.history.find(HistoryQuery(tenant="acme", name="support"), 1).entries
    assert [change.type for change in entry.changes] == ["version_registered", "alias_moved"]


def test_a_search_continues_from_its_last_page(catalog: AdapterCatalog) -> None:
    for number in range(BLOCK + 10):
        catalog.limit_tenant("acme", max_concurrent=number + 1, actor="ann")
    newest = catalog.reader.state.seq
    seqs: list[int] = []
    before = None
    while True:
        page = catalog.reader.history.find(HistoryQuery(), 50, before)
        seqs += [entry.seq for entry in page.entries]
        before = page.before
        if before is None:
            break
    assert seqs == list(range(newest, 0, -1))


def test_a_search_tolerates_a_writers_slow_clock(
    catalog: AdapterCatalog, clock: list[float]
) -> None:
    for time in (50_000.0, 49_900.0, 50_100.0):
        clock[0] = time
        catalog.create_tenant(f"at-{time:.0f}", actor="ann")
    assert found(catalog, since=50_000.0) == [5, 3]


def test_a_long_search_stops_and_returns_where_to_continue(
    catalog: AdapterCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.catalog.history._MOST_READ", 10)
    for number in range(30):
        catalog.limit_tenant("acme", max_concurrent=number + 1, actor="ann")
    page = catalog.reader.history.find(HistoryQuery(actor="nobody"), 5)
    assert page.entries == ()
    assert page.before == catalog.reader.state.seq - 9


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_catalog_as_of_any_entry_equals_the_state_of_that_time(
    catalog: AdapterCatalog, register: Register, clock: list[float], snapshot: bool
) -> None:
    states = {catalog.reader.state.seq: catalog.reader.state}
    for number in range(1, 6):
        clock[0] = 1000.0 + 100 * number
        register("acme/support", str(number).encode(), promote=True)
        states[catalog.reader.state.seq] = catalog.reader.state
        if snapshot and number == 3:
            catalog.reader.snapshot()

    for seq, state in states.items():
        view = catalog.reader.history.as_of(seq)
        assert view.state.seq == seq
        assert view.ask(lambda at: list(at.adapters())) == list(state.adapters())
        assert view.ask(lambda at: at.tenants()) == state.tenants()
    assert prod(catalog.reader.history.as_of_time(1299.0)) == 2
    assert prod(catalog.reader.history.as_of_time(1300.0)) == 3
    assert prod(catalog.reader.history.as_of_time(9000.0)) == 5
    with pytest.raises(InvalidInput, match="made at 1970-01-01T00:16:40"):
        catalog.reader.history.as_of_time(999.0)
    for seq in (0, catalog.reader.state.seq + 1):
        with pytest.raises(InvalidInput, match="want an entry from 1 to"):
            catalog.reader.history.as_of(seq)


def test_a_restored_adapter_has_its_versions_aliases_and_pin(
    catalog: AdapterCatalog, register: Register, clock: list[float]
) -> None:
    for number in range(1, 5):
        register("acme/support", str(number).encode(), promote=number < 4, shared=True)
    catalog.promote("acme", "support", 2, "canary", actor="ann")
    catalog.give_share("acme", "support", 4, 0.25, actor="ann")
    catalog.retire("acme", "support", 1, actor="ann")
    pin = catalog.pin("acme", "support", tier=Residency.HOST, expires=5000.0, actor="ann")
    before = catalog.reader.state.adapter("acme", "support")
    retired = catalog.retire("acme", "support", actor="eve")
    catalog.create_tenant("later", actor="ann")
    catalog.reader.snapshot()
    assert retired.retired
    assert catalog.reader.state.visible_to("later") == ()

    reader = AdapterCatalog(open_store(catalog.store.url), clock=lambda: clock[0])
    restored = reader.restore("acme", "support", actor="bob")

    assert (restored.versions, restored.aliases) == (before.versions, before.aliases)
    assert (restored.alias_history, restored.shares) == (before.alias_history, before.shares)
    assert restored.shared
    catalog.reader.refresh()
    again = catalog.reader.state.pin_of("acme", "support")
    assert again is not None
    assert (again.tier, again.expires, again.actor) == (pin.tier, pin.expires, "bob")
    assert catalog.reader.state.resolve("acme/support", "later").version == 3
    with pytest.raises(Conflict, match=r"not retired.*lorikeet restore acme/support@1"):
        catalog.restore("acme", "support", actor="bob")


def test_a_pin_that_expired_meanwhile_does_not_come_back(
    catalog: AdapterCatalog, register: Register, clock: list[float]
) -> None:
    register("acme/support", b"1")
    catalog.pin("acme", "support", expires=5000.0, actor="ann")
    catalog.retire("acme", "support", actor="ann")
    clock[0] = 6000.0
    assert catalog.restore("acme", "support", actor="ann").aliases == {"prod": 1}
    assert catalog.reader.state.pin_of("acme", "support") is None


def test_one_version_is_restored(catalog: AdapterCatalog, register: Register) -> None:
    for number in (b"1", b"2", b"3"):
        register("acme/support", number, promote=True)
    catalog.retire("acme", "support", 1, actor="ann")

    assert not catalog.restore("acme", "support", 1, actor="ann").versions[0].retired
    seq = catalog.reader.state.seq
    catalog.restore("acme", "support", 1, actor="ann")
    assert catalog.reader.state.seq == seq  # nothing to do is no entry
    with pytest.raises(UnknownModel, match="no version 9"):
        catalog.restore("acme", "support", 9, actor="ann")

    catalog.retire("acme", "support", actor="ann")
    back = catalog.restore("acme", "support", 2, actor="ann")
    assert (back.aliases, [v.retired for v in back.versions]) == ({"prod": 2}, [True, False, True])
