"""Who a request comes from, by its key."""

from dataclasses import dataclass

from lorikeet.catalog.records import KeyRecord, Limits, Scope, secret_sha256
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import EndedKey, Forbidden, InvalidKey

_UNKNOWN = "this API key is unknown or was revoked: ask your admin for another"
_READ_ONLY = "this key is read-only: use one that may change things"
_REFUSALS = {
    Scope.INFER: "this key may not infer: use a tenant's key with scope infer",
    Scope.ADMIN: "this key is not an admin's: use one that `lorikeet init` or another admin made",
}


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of a good key. `tenant` is None for admins, who belong to none.

    limits, priority: the key's own. Its limits hold beside its tenant's; those are in the tenant's
    record, in the same view of the catalog.
    """

    tenant: str | None
    key_id: str
    scopes: frozenset[Scope]
    limits: Limits
    priority: int = 0


def authenticate(
    state: CatalogState,
    authorization: str | None,
    scope: Scope,
    now: float,
    *,
    reading: bool = False,
) -> Principal:
    """The principal of an `Authorization: Bearer lk_…` header that may do what is asked.

    scope: INFER on tenants' routes, ADMIN on admins'. Admins do not infer and tenants do not
    administer, whatever scopes their keys were given. reading: a request that changes and computes
    nothing, so a read-only key will do as well. now: Unix seconds. Raises InvalidKey, Forbidden;
    EndedKey for a key that no later view of the catalog will accept.
    """
    key = _key(state, authorization, now)
    of_this_plane = (key.tenant is not None) is (scope is Scope.INFER)
    enough = {scope, Scope.READ_ONLY} if reading else {scope}
    if not of_this_plane or not enough & key.scopes:
        read_only = of_this_plane and Scope.READ_ONLY in key.scopes
        raise Forbidden(_READ_ONLY if read_only else _REFUSALS[scope])
    return Principal(key.tenant, key.id, key.scopes, key.limits, key.priority)


def _key(state: CatalogState, authorization: str | None, now: float) -> KeyRecord:
    kind, _, secret = (authorization or "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise InvalidKey(
            "no API key: send it as `Authorization: Bearer lk_…`, a tenant's also as `x-api-key`"
        )
    key = state.key_by_sha256(secret_sha256(secret.strip()))
    if key is None:
        raise InvalidKey(_UNKNOWN)
    if key.revoked:
        raise EndedKey(_UNKNOWN)
    if key.expired(now):
        raise EndedKey("this API key has expired: ask your admin for another")
    return key
