"""A key permits exactly the operations of its scopes."""

import time
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Limits, Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import Forbidden, InvalidKey
from lorikeet.gateway.auth import authenticate

NOW = 1000.0


@pytest.fixture
def catalog(tmp_path: Path) -> AdapterCatalog:
    made = AdapterCatalog.init(LocalStore(tmp_path))
    made.create_tenant("acme", actor="test")
    return made


def test_a_tenants_key_names_its_tenant(catalog: AdapterCatalog) -> None:
    record, secret = catalog.create_key("acme", {Scope.INFER}, actor="test")
    key = authenticate(catalog.reader.state, f"Bearer {secret}", Scope.INFER, NOW)
    assert (key.tenant, key.id) == ("acme", record.id)


def test_the_word_bearer_is_case_insensitive(catalog: AdapterCatalog) -> None:
    _, secret = catalog.create_key("acme", {Scope.INFER}, actor="test")
    for header in (f"bearer {secret}", f"BEARER  {secret} "):
        assert authenticate(catalog.reader.state, header, Scope.INFER, NOW).tenant == "acme"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic eDp5", "lk_x", "\x00"])
def test_no_key_is_refused(catalog: AdapterCatalog, header: str | None) -> None:
    with pytest.raises(InvalidKey, match="no API key"):
        authenticate(catalog.reader.state, header, Scope.INFER, NOW)


def test_unknown_and_revoked_keys_look_alike(catalog: AdapterCatalog) -> None:
    record, secret = catalog.create_key("acme", {Scope.INFER}, actor="test")
    catalog.revoke_key(record.id, actor="test")
    with pytest.raises(InvalidKey) as revoked:
        authenticate(catalog.reader.state, f"Bearer {secret}", Scope.INFER, NOW)
    with pytest.raises(InvalidKey) as unknown:
        authenticate(catalog.reader.state, f"Bearer {secret}x", Scope.INFER, NOW)
    assert revoked.value.message == unknown.value.message
    assert secret not in revoked.value.message


def test_a_tenants_key_never_administers_even_with_admin_scope(catalog: AdapterCatalog) -> None:
    for scopes in ({Scope.INFER}, {Scope.ADMIN}, {Scope.INFER, Scope.ADMIN}):
        _, secret = catalog.create_key("acme", scopes, actor="test")
        with pytest.raises(Forbidden):
            authenticate(catalog.reader.state, f"Bearer {secret}", Scope.ADMIN, NOW)


def test_a_key_without_the_scope_is_forbidden(catalog: AdapterCatalog) -> None:
    _, secret = catalog.create_key("acme", {Scope.ADMIN}, actor="test")
    with pytest.raises(Forbidden):
        authenticate(catalog.reader.state, f"Bearer {secret}", Scope.INFER, NOW)


def test_an_admin_administers_and_does_not_infer(catalog: AdapterCatalog) -> None:
    _, secret = catalog.create_key(None, {Scope.ADMIN}, actor="test")
    assert authenticate(catalog.reader.state, f"Bearer {secret}", Scope.ADMIN, NOW).tenant is None
    with pytest.raises(Forbidden, match="tenant's key"):
        authenticate(catalog.reader.state, f"Bearer {secret}", Scope.INFER, NOW)


@pytest.mark.parametrize(("tenant", "scope"), [("acme", Scope.INFER), (None, Scope.ADMIN)])
def test_a_read_only_key_reads_on_its_own_plane_and_does_nothing_else(
    catalog: AdapterCatalog, tenant: str | None, scope: Scope
) -> None:
    _, secret = catalog.create_key(tenant, {Scope.READ_ONLY}, actor="test")
    header = f"Bearer {secret}"
    assert authenticate(catalog.reader.state, header, scope, NOW, reading=True).tenant == tenant
    with pytest.raises(Forbidden, match="read-only"):
        authenticate(catalog.reader.state, header, scope, NOW)
    other = Scope.ADMIN if scope is Scope.INFER else Scope.INFER
    with pytest.raises(Forbidden):
        authenticate(catalog.reader.state, header, other, NOW, reading=True)


def test_a_key_ends_when_it_expires(catalog: AdapterCatalog) -> None:
    ends = time.time() + 100.0
    _, secret = catalog.create_key("acme", {Scope.INFER}, expires=ends, actor="test")
    header = f"Bearer {secret}"
    assert authenticate(catalog.reader.state, header, Scope.INFER, ends - 0.1).tenant == "acme"
    with pytest.raises(InvalidKey, match="expired"):
        authenticate(catalog.reader.state, header, Scope.INFER, ends)


def test_a_key_carries_its_own_limits(catalog: AdapterCatalog) -> None:
    catalog.limit_tenant("acme", max_context=100, actor="test")
    record, secret = catalog.create_key("acme", {Scope.INFER}, max_context=10, actor="test")
    catalog.limit_key(record.id, requests_per_min=5, actor="test")
    key = authenticate(catalog.reader.state, f"Bearer {secret}", Scope.INFER, NOW)
    assert key.limits == Limits(requests_per_min=5, max_context=10)
