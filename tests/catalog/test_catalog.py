"""Tenants and keys of a catalog."""

from collections.abc import Callable

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import Scope, VersionRecord, secret_sha256
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import (
    Conflict,
    InvalidInput,
    StoreError,
    UnknownKey,
    UnknownTenant,
)
from lorikeet_engine.adapter import Residency

Register = Callable[..., VersionRecord]


def test_a_store_holds_one_catalog(store: ObjectStore) -> None:
    AdapterCatalog.init(store)

    with pytest.raises(Conflict, match="already is a catalog"):
        AdapterCatalog.init(store)


def test_an_empty_store_raises_with_the_remedy(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="lorikeet init"):
        CatalogReader(store).refresh()


def test_a_second_reader_sees_the_same_state(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    register("acme/support", b"1")
    catalog.create_key("acme", [Scope.INFER, Scope.ADMIN], actor="ann")
    catalog.pin("acme", "support", tier=Residency.HOST, replicas=2, expires=2000.0, actor="ann")
    reader = CatalogReader(store)

    assert reader.state == CatalogState()
    assert reader.refresh() == catalog.reader.state
    assert reader.state is reader.refresh()


def test_a_tenant_is_created_once(catalog: AdapterCatalog) -> None:
    catalog.limit_tenant("acme", max_concurrent=4, actor="ann")

    with pytest.raises(Conflict, match="already is a tenant 'acme'"):
        catalog.create_tenant("acme", actor="bob")
    assert catalog.reader.state.tenant("acme").limits.max_concurrent == 4


def test_a_tenants_limit_is_changed_in_place(catalog: AdapterCatalog, clock: list[float]) -> None:
    clock[0] = 2000.0

    limited = catalog.limit_tenant("acme", max_concurrent=4, actor="bob")
    assert (limited.limits.max_concurrent, limited.created) == (4, 1000.0)
    before = catalog.reader.state.seq
    assert catalog.limit_tenant("acme", max_concurrent=4, actor="bob") == limited
    assert catalog.reader.state.seq == before
    lifted = catalog.limit_tenant("acme", max_concurrent=None, actor="bob")
    assert lifted.limits.max_concurrent is None
    assert [tenant.name for tenant in catalog.reader.state.tenants()] == ["acme"]
    with pytest.raises(InvalidInput, match="max_concurrent=0"):
        catalog.limit_tenant("acme", max_concurrent=0, actor="bob")
    with pytest.raises(UnknownTenant, match="nobody"):
        catalog.limit_tenant("nobody", max_concurrent=4, actor="bob")


@pytest.mark.parametrize(
    ("name", "limit", "param"), [("A", None, "tenant"), ("a", 0, "max_concurrent")]
)
def test_an_invalid_tenant_is_refused(
    catalog: AdapterCatalog, name: str, limit: int | None, param: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        catalog.create_tenant(name, max_concurrent=limit, actor="ann")

    assert refused.value.param == param


def test_a_key_is_found_by_its_secrets_hash_and_its_secret_is_not_kept(
    catalog: AdapterCatalog, store: ObjectStore
) -> None:
    key, secret = catalog.create_key("acme", [Scope.INFER], actor="ann")

    assert secret.startswith("lk_")
    assert len(secret) >= 3 + 256 // 6
    assert catalog.reader.state.key_by_sha256(secret_sha256(secret)) == key
    assert catalog.reader.state.key_by_sha256(secret_sha256(secret + "x")) is None
    assert (key.tenant, key.scopes, key.created) == ("acme", {Scope.INFER}, 1000.0)
    assert not any(secret.encode() in store.get(name) for name in store.list(""))


def test_a_revoked_key_stays_in_the_catalog_and_revoked(catalog: AdapterCatalog) -> None:
    key, secret = catalog.create_key("acme", [Scope.INFER], actor="ann")

    assert catalog.revoke_key(key.id, actor="ann").revoked
    before = catalog.reader.state.seq
    assert catalog.revoke_key(key.id, actor="ann").revoked
    assert catalog.reader.state.seq == before
    found = catalog.reader.state.key_by_sha256(secret_sha256(secret))
    assert found is not None
    assert found.revoked


def test_the_last_admins_key_is_not_revoked(catalog: AdapterCatalog) -> None:
    first, _ = catalog.create_key(None, [Scope.ADMIN], actor="ann")
    catalog.create_key("acme", [Scope.INFER, Scope.ADMIN], actor="ann")  # a tenant's: no admin

    with pytest.raises(Conflict, match="keys create --admin"):
        catalog.revoke_key(first.id, actor="ann")

    second, _ = catalog.create_key(None, [Scope.ADMIN], actor="ann")
    assert catalog.revoke_key(first.id, actor="bob").revoked
    with pytest.raises(Conflict, match="the last admin's key"):
        catalog.revoke_key(second.id, actor="bob")
    assert not catalog.reader.state.key(second.id).revoked


def test_invalid_keys_are_refused(catalog: AdapterCatalog) -> None:
    with pytest.raises(UnknownTenant, match="nobody"):
        catalog.create_key("nobody", [Scope.INFER], actor="ann")
    with pytest.raises(InvalidInput, match="at least one"):
        catalog.create_key("acme", [], actor="ann")
    with pytest.raises(InvalidInput, match="tenant"):
        catalog.create_key(None, [Scope.INFER], actor="ann")
    with pytest.raises(UnknownKey):
        catalog.revoke_key("key-none", actor="ann")
