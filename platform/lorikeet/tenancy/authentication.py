"""Who a request comes from, by its key."""

from dataclasses import dataclass

from lorikeet.catalog.keys import secret_sha256
from lorikeet.catalog.records import KeyRecord, Scope
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Forbidden, InvalidKey

_REFUSALS = {
    Scope.INFER: "this key may not infer: use a tenant's key with scope infer",
    Scope.ADMIN: "this key is not an admin's: use one that `lorikeet init` or another admin made",
}


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of a good key. `tenant` is None for admins, who belong to none."""

    tenant: str | None
    key_id: str
    scopes: frozenset[Scope]


def authenticate(state: CatalogState, authorization: str | None, scope: Scope) -> Principal:
    """The principal of an `Authorization: Bearer lk_…` header that may do what `scope` allows.

    Admins do not infer and tenants do not administer, whatever scopes their keys were given.
    Raises InvalidKey, Forbidden.
    """
    key = _key(state, authorization)
    principal = Principal(key.tenant, key.id, key.scopes)
    tenants_own = scope is Scope.INFER
    if scope not in key.scopes or (key.tenant is not None) is not tenants_own:
        raise Forbidden(_REFUSALS[scope])
    return principal


def _key(state: CatalogState, authorization: str | None) -> KeyRecord:
    kind, _, secret = (authorization or "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise InvalidKey("no API key: send it as `Authorization: Bearer lk_…`")
    key = state.key_by_sha256(secret_sha256(secret.strip()))
    if key is None or key.revoked:
        raise InvalidKey("this API key is unknown or was revoked: ask your admin for another")
    return key
