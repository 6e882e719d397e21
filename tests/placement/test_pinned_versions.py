"""Versions that pins select as the catalog changes."""

import hashlib
import math
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.local import LocalStore
from lorikeet.placement.pinned_versions import PinResolver, ResolvedPins


@pytest.fixture
def catalog(tmp_path: Path) -> AdapterCatalog:
    """A catalog at the time 1000 with the tenant acme."""
    made = AdapterCatalog.init(LocalStore(tmp_path / "store"), clock=lambda: 1000.0)
    made.create_tenant("acme", actor="ann")
    return made


def register(catalog: AdapterCatalog, folder: Path, name: str, data: bytes, **more: bool) -> None:
    blob = folder / "blob"
    blob.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    facts = BlobFacts(digest, len(data), 8, "tiny", gpu_bytes=10 * len(data))
    catalog.register("acme", name, blob, facts, actor="ann", **more)


def read(catalog: AdapterCatalog, now: float) -> ResolvedPins:
    return catalog.reader.ask(lambda state: PinResolver().resolve(state, now))


def promised(catalog: AdapterCatalog, now: float = 1000.0) -> list[list[str]]:
    """The versions of each pin."""
    versions = [promise.versions for promise in read(catalog, now).all]
    return [[str(version.ref) for version in some] for some in versions]


def test_a_pin_follows_its_alias_and_both_versions_of_a_share(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    register(catalog, tmp_path, "support", b"1")
    register(catalog, tmp_path, "support", b"22")
    catalog.pin("acme", "support", actor="ann")
    assert promised(catalog) == [["acme/support@1"]]
    catalog.give_share("acme", "support", 2, 0.1, actor="ann")
    assert promised(catalog) == [["acme/support@1", "acme/support@2"]]
    catalog.promote("acme", "support", 2, actor="ann")
    assert promised(catalog) == [["acme/support@2"]]
    catalog.rollback("acme", "support", actor="ann")
    assert promised(catalog) == [["acme/support@1"]]


def test_a_tenants_pin_keeps_its_adapters_now_and_later_the_oldest_first(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.pin("acme", None, actor="ann")
    assert promised(catalog) == [[]]
    for name, data in (("support", b"1"), ("legal", b"2"), ("support", b"3")):
        register(catalog, tmp_path, name, data)
    assert promised(catalog) == [["acme/legal@1", "acme/support@1"]]  # at the same second
    catalog.promote("acme", "support", 2, actor="ann")
    catalog.retire("acme", "legal", actor="ann")
    assert promised(catalog) == [["acme/support@2"]]


def test_image_bytes_are_counted_on_one_gpu(catalog: AdapterCatalog, tmp_path: Path) -> None:
    register(catalog, tmp_path, "support", b"1234")
    catalog.pin("acme", None, actor="ann")
    (promise,) = read(catalog, 1000.0).all
    assert {v.ref.name: v.image_bytes for v in promise.versions} == {"support": 40}


def test_an_expired_pin_is_not_resolved(catalog: AdapterCatalog, tmp_path: Path) -> None:
    register(catalog, tmp_path, "support", b"1")
    catalog.pin("acme", "support", expires=1060.0, actor="ann")
    catalog.pin("acme", None, expires=1030.0, actor="ann")
    ends = [read(catalog, now).until for now in (1000.0, 1030.0, 1060.0)]
    assert ends == [1030.0, 1060.0, math.inf]
    counts = [len(promised(catalog, now)) for now in (1029.9, 1030.0, 1060.0)]
    assert counts == [2, 1, 0]


def test_only_tenants_with_pins_have_budgets(catalog: AdapterCatalog, tmp_path: Path) -> None:
    catalog.create_tenant("globex", actor="ann")
    for tenant in ("acme", "globex"):
        catalog.limit_tenant(tenant, pin_budget_bytes=100, actor="ann")
    register(catalog, tmp_path, "support", b"1")
    catalog.pin("acme", "support", actor="ann")
    assert read(catalog, 1000.0).budgets == {"acme": 100}
    catalog.limit_tenant("acme", pin_budget_bytes=None, actor="ann")
    assert read(catalog, 1000.0).budgets == {}


def test_a_reader_of_a_snapshot_resolves_the_same_pins(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    for name in ("support", "legal"):
        register(catalog, tmp_path, name, name.encode())
    catalog.limit_tenant("acme", pin_budget_bytes=1000, actor="ann")
    catalog.pin("acme", None, replicas=2, priority=-7, expires=2000.0, actor="ann")
    catalog.pin("acme", "support", priority=3, reason="launch", actor="ann")
    catalog.reader.snapshot()
    reader = AdapterCatalog(catalog.store)
    reader.reader.refresh()
    known = read(reader, 1000.0)
    assert known == read(catalog, 1000.0)
    assert [(p.pin.name, p.pin.priority) for p in known.all] == [(None, -7), ("support", 3)]
    assert known.budgets == {"acme": 1000}


def test_only_pins_of_changed_tenants_are_resolved_again(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.create_tenant("globex", actor="ann")
    register(catalog, tmp_path, "support", b"1")
    register(catalog, tmp_path, "support", b"2")
    catalog.pin("acme", "support", actor="ann")
    catalog.pin("globex", None, actor="ann")
    resolver = PinResolver()
    first = resolver.resolve(catalog.reader.state, 1000.0)
    catalog.promote("acme", "support", 2, actor="ann")
    catalog.pin("acme", "support", priority=1, actor="ann")
    catalog.limit_tenant("acme", pin_budget_bytes=7, actor="ann")
    second = resolver.resolve(catalog.reader.state, 1000.0)
    assert second == read(catalog, 1000.0)
    assert second.all[1] is first.all[1]
    assert (second.all[0].pin.priority, second.budgets) == (1, {"acme": 7})
