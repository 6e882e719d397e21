"""Options of tenants and keys: rules, rotation and storage."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Limits, Scope, TenantRecord, secret_sha256
from lorikeet.catalog.rules.limits import KeyOptions
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import Conflict, InvalidInput, StoreError

TERMS: dict[str, Any] = {
    "requests_per_min": 600,
    "tokens_per_min": 10**6,
    "burst_s": 30.0,
    "max_concurrent": 8,
    "max_context": 8192,
    "bytes_per_min": 2**33,
    "tokens_per_month": 10**9,
    "cost_per_month": 99.5,
    "weight": 2.0,
    "max_adapters": 20,
    "max_total_bytes": 2**31,
    "pin_budget_bytes": 2**30,
    "max_rank": 32,
    "max_adapter_bytes": 2**29,
    "files_bytes": 2**28,
    "max_files": 100,
    "open_batches": 3,
    "batch_lines": 16,
}


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """Use the local store only: the bytes are the same in every store."""
    return str(tmp_path / "store")


def test_options_that_are_not_given_stay(catalog: AdapterCatalog) -> None:
    catalog.limit_tenant("acme", max_context=10, weight=3.0, actor="ann")
    catalog.limit_tenant("acme", requests_per_min=7, max_context=None, actor="ann")

    expected = TenantRecord("acme", 1000.0, Limits(requests_per_min=7), weight=3.0)
    assert catalog.reader.state.tenant("acme") == expected


def test_every_option_survives_log_and_snapshots(
    catalog: AdapterCatalog, store: ObjectStore
) -> None:
    catalog.create_tenant("full", actor="ann", **TERMS)
    limits = {name: value for name, value in TERMS.items() if name in Limits.__slots__}
    of_key = {name: value for name, value in limits.items() if not name.endswith("_per_month")}
    key, _ = catalog.create_key(
        "full", [Scope.INFER], name="ci", expires=5000.0, priority=-1, actor="ann", **of_key
    )
    catalog.rotate_key(key.id, 60.0, actor="ann")
    catalog.create_key("full", [Scope.PUBLISH], adapters=("policy-*", "draft"), actor="ann")
    catalog.create_key("full", [Scope.INFER], adapters=("policy-*", "lab/tone"), actor="ann")
    record = catalog.reader.state.tenant("full")
    assert record.limits == Limits(**limits)
    assert {name: getattr(record, name) for name in TERMS.keys() - limits} == {
        name: TERMS[name] for name in TERMS.keys() - limits
    }

    of_log = CatalogReader(store).refresh()
    catalog.reader.snapshot()
    reader = CatalogReader(store)
    reader.refresh()
    for state in (of_log, catalog.reader.state):
        assert reader.ask(lambda stored: stored.tenants()) == state.tenants()
        assert reader.ask(lambda stored: stored.keys()) == state.keys()


@pytest.mark.parametrize("schema", [1, 6])
def test_a_partition_of_an_unknown_schema_is_refused(
    catalog: AdapterCatalog, tmp_path: Path, schema: int
) -> None:
    catalog.reader.snapshot()
    store = LocalStore(tmp_path / "store")
    part = b'{"schema":%d,"keys":{},"key_ids":{},"shared":[],"pins":[],"admin_keys":[]}' % schema
    digest = hashlib.sha256(part).hexdigest()
    store.put_if_absent(f"snapshot-partitions/{digest[:2]}/{digest}", zlib.compress(part))
    (manifest,) = (tmp_path / "store" / "snapshots").iterdir()
    body = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps(body | {"partitions": [digest] * len(body["partitions"])}))
    reader = CatalogReader(store)
    reader.refresh()

    with pytest.raises(StoreError, match=f"schema {schema} .*upgrade"):
        reader.ask(lambda state: state.tenant("acme"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in TERMS),
        ("max_context", 10**16),
        ("weight", float("inf")),
        ("weight", float("nan")),
        ("burst_s", 1e6),
    ],
)
def test_invalid_options_are_refused(catalog: AdapterCatalog, name: str, value: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        catalog.limit_tenant("acme", actor="ann", **{name: value})  # type: ignore[misc]

    assert refused.value.param == name


def test_a_rotated_key_has_a_successor_with_its_options(
    catalog: AdapterCatalog, clock: list[float]
) -> None:
    options = KeyOptions(name="ci", max_concurrent=3, priority=2, expires=3000.0)
    old, old_secret = catalog.create_key("acme", [Scope.READ_ONLY], actor="ann", **options)
    clock[0] = 1500.0
    before = catalog.reader.state.seq
    new, secret = catalog.rotate_key(old.id, 60.0, actor="ann")

    assert catalog.reader.state.seq == before + 1  # one entry: both or neither
    assert (new.tenant, new.scopes, new.name, new.priority, new.limits) == (
        "acme",
        {Scope.READ_ONLY},
        "ci",
        2,
        Limits(max_concurrent=3),
    )
    assert (new.created, new.expires) == (1500.0, 3500.0)  # 2000 s, as the old one had
    assert catalog.reader.state.key_by_sha256(secret_sha256(secret)) == new
    replaced = catalog.reader.state.key_by_sha256(secret_sha256(old_secret))
    assert replaced is not None
    assert (replaced.expires, replaced.replaced_by) == (1560.0, new.id)
    assert (replaced.expired(1559.9), replaced.expired(1560.0)) == (False, True)
    with pytest.raises(Conflict, match=f"rotate {new.id}"):
        catalog.rotate_key(old.id, 60.0, actor="bob")


def test_an_overlap_never_extends_an_expiry(catalog: AdapterCatalog) -> None:
    old, _ = catalog.create_key("acme", [Scope.INFER], expires=1100.0, actor="ann")
    catalog.rotate_key(old.id, 3600.0, actor="ann")

    assert catalog.reader.state.key(old.id).expires == 1100.0


def test_without_overlap_the_old_key_is_revoked(catalog: AdapterCatalog) -> None:
    old, _ = catalog.create_key("acme", [Scope.INFER], actor="ann")
    new, _ = catalog.rotate_key(old.id, 0, actor="ann")

    assert catalog.reader.state.key(old.id).revoked
    assert not catalog.reader.state.key(new.id).revoked


def test_an_invalid_key_is_not_rotated(catalog: AdapterCatalog, clock: list[float]) -> None:
    revoked, _ = catalog.create_key("acme", [Scope.INFER], actor="ann")
    catalog.revoke_key(revoked.id, actor="ann")
    expired, _ = catalog.create_key("acme", [Scope.INFER], expires=1010.0, actor="ann")
    clock[0] = 1010.0
    for key in (revoked, expired):
        with pytest.raises(Conflict, match="keys create"):
            catalog.rotate_key(key.id, 60.0, actor="ann")
    with pytest.raises(Conflict, match="revoked"):
        catalog.limit_key(revoked.id, max_context=5, actor="ann")


def test_an_admins_key_without_expiry_always_remains(
    catalog: AdapterCatalog, clock: list[float]
) -> None:
    first, _ = catalog.create_key(None, [Scope.ADMIN], actor="ann")
    catalog.create_key(None, [Scope.ADMIN], expires=2000.0, actor="ann")  # does not last
    catalog.create_key(None, [Scope.READ_ONLY], actor="ann")  # changes nothing
    with pytest.raises(Conflict, match="the last admin's key that never expires"):
        catalog.revoke_key(first.id, actor="ann")

    second, _ = catalog.rotate_key(first.id, 60.0, actor="ann")
    catalog.revoke_key(first.id, actor="ann")
    assert second.expires is None
    clock[0] = 2000.0
    with pytest.raises(Conflict, match="the last admin's key that never expires"):
        catalog.revoke_key(second.id, actor="ann")


def test_an_admins_key_has_no_limits(catalog: AdapterCatalog) -> None:
    with pytest.raises(InvalidInput, match="tenants' keys"):
        catalog.create_key(None, [Scope.ADMIN], max_context=5, actor="ann")
    key, _ = catalog.create_key(None, [Scope.ADMIN], name="bob's", actor="ann")
    with pytest.raises(InvalidInput, match="tenants' keys"):
        catalog.limit_key(key.id, max_context=5, actor="ann")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"priority": -1001}, "priority"),
        ({"name": "a\x1b[2J"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"expires": 1000.0}, "expires"),
        ({"expires": float("nan")}, "expires"),
        ({"expires": 1e12}, "expires"),
    ],
)
def test_keys_with_invalid_options_are_refused(
    catalog: AdapterCatalog, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        catalog.create_key("acme", [Scope.INFER], actor="ann", **options)

    assert refused.value.param == param


def test_a_publish_key_may_push_only_adapters_that_match_its_patterns(
    catalog: AdapterCatalog,
) -> None:
    key, _ = catalog.create_key(
        "acme", [Scope.PUBLISH], adapters=("policy-*", "draft"), actor="ann"
    )

    assert [name for name in ("policy-7", "policy", "draft", "drafts") if key.may_push(name)] == [
        "policy-7",
        "draft",
    ]


def test_a_key_may_use_only_adapters_that_match_its_patterns(catalog: AdapterCatalog) -> None:
    key, _ = catalog.create_key(
        "acme", [Scope.INFER], adapters=("draft-*", "tone", "lab/*"), actor="ann"
    )
    labels = ["acme/draft-1", "acme/tone", "lab/tone", "acme/tones", "other/tone", "lab2/tone"]

    assert [at for at in labels if key.may_use(*at.split("/"))] == labels[:3]
    new, _ = catalog.rotate_key(key.id, 60.0, actor="ann")
    assert [at for at in labels if new.may_use(*at.split("/"))] == labels[:3]
    free, _ = catalog.create_key("acme", [Scope.INFER], actor="ann")
    assert all(free.may_use(*at.split("/")) for at in labels)


def test_older_readers_refuse_only_entries_that_they_would_misread(
    catalog: AdapterCatalog, store: ObjectStore
) -> None:
    catalog.create_key("acme", [Scope.PUBLISH], adapters=("tone",), actor="ann")
    catalog.create_key("acme", [Scope.INFER], name="free", actor="ann")
    before = schemas(store)
    key, _ = catalog.create_key("acme", [Scope.INFER], adapters=("tone",), actor="ann")
    catalog.rotate_key(key.id, 60.0, actor="ann")

    catalog.limit_tenant("acme", tokens_per_month=5, actor="ann")
    catalog.limit_tenant("acme", cost_per_month=2.5, actor="ann")

    assert set(before) == {1}
    assert schemas(store) == [*before, 2, 2, 1, 2]


def schemas(store: ObjectStore) -> list[int]:
    """Schemas of the log's own entries, oldest first."""
    return [json.loads(store.get(key))["schema"] for key in store.list("log/")]


@pytest.mark.parametrize(
    ("tenant", "scopes", "adapters", "param"),
    [
        ("acme", [Scope.PUBLISH], (), "adapters"),
        ("acme", [Scope.PUBLISH], ("Policy",), "adapters"),
        ("acme", [Scope.PUBLISH], ("[a-z]",), "adapters"),
        ("acme", [Scope.PUBLISH, Scope.INFER], ("policy",), "scopes"),
        ("acme", [Scope.PUBLISH], ("acme/policy",), "adapters"),
        (None, [Scope.PUBLISH], ("policy",), "scopes"),
        (None, [Scope.READ_ONLY], ("policy",), "adapters"),
        ("acme", [Scope.INFER], ("Policy",), "adapters"),
        ("acme", [Scope.INFER], ("",), "adapters"),
        ("acme", [Scope.INFER], ("policy@prod",), "adapters"),
        ("acme", [Scope.INFER], ("lab/tone/x",), "adapters"),
        ("acme", [Scope.INFER], ("policy",) * 65, "adapters"),
    ],
)
def test_keys_with_unfit_scopes_and_patterns_of_adapters_are_refused(
    catalog: AdapterCatalog,
    tenant: str | None,
    scopes: list[Scope],
    adapters: tuple[str, ...],
    param: str,
) -> None:
    with pytest.raises(InvalidInput) as refused:
        catalog.create_key(tenant, scopes, adapters=adapters, actor="ann")

    assert refused.value.param == param
