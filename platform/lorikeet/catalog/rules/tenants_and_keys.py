"""Rules of operations on tenants and keys: pure functions that return the changes to commit."""

from collections.abc import Collection
from typing import cast

from lorikeet.catalog.changes import (
    KeyCreated,
    KeyOptionsSet,
    KeyReplaced,
    KeyRevoked,
    TenantCreated,
    TenantOptionsSet,
)
from lorikeet.catalog.records import Scope
from lorikeet.catalog.rules.adapters import Changes
from lorikeet.catalog.rules.limits import (
    KeyOptions,
    TenantOptions,
    check_may_have_limits,
    options_of,
    with_options,
)
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict


def create_tenant(state: CatalogState, name: str, options: TenantOptions) -> Changes:
    """Return the changes that create a tenant. Raises Conflict if the name is taken."""
    if state.tenant_state(name) is not None:
        raise Conflict(
            f"there already is a tenant {name!r}: `lorikeet tenants limit` sets its limits",
            param="tenant",
        )
    saved = TenantCreated(name=name)
    return (saved, TenantOptionsSet(tenant=name, options=options)) if options else (saved,)


def limit_tenant(state: CatalogState, change: TenantOptionsSet) -> Changes:
    """Return the changes that set some options of a tenant; none if they are so already.

    Raises UnknownTenant.
    """
    record = state.tenant(change.tenant)
    return () if with_options(record, change.options) == record else (change,)


def create_key(state: CatalogState, change: KeyCreated, options: KeyOptions) -> Changes:
    """Return the changes that create a key. Raises UnknownTenant if its owner does not exist.

    change: id, owner, scopes and hashed secret of the key.
    """
    if change.tenant is not None:
        state.tenant(change.tenant)
    return (change, KeyOptionsSet(id=change.id, options=options)) if options else (change,)


def limit_key(state: CatalogState, change: KeyOptionsSet) -> Changes:
    """Return the changes that set some limits or the priority of a key.

    Raises UnknownKey, InvalidInput for an admin's key, which has no limits, and Conflict if the key
    is revoked.
    """
    key = state.key(change.id)
    check_may_have_limits(key.tenant, change.options)
    if key.revoked:
        raise Conflict(f"{key.id} is revoked: nothing is left to limit", param="id")
    return () if with_options(key, change.options) == key else (change,)


def rotate_key(
    state: CatalogState, key_id: str, new_id: str, new_sha256: str, now: float, overlap_s: float
) -> Changes:
    """Return the changes that replace a key by a copy with another secret.

    If the key expires, the copy begins a new lifetime of the same length.

    new_id: id of the copy.
    new_sha256: SHA-256 of its secret.
    now: Unix seconds.
    overlap_s: seconds after which the old key expires, unless it expires sooner; 0: it is revoked.

    Raises UnknownKey, and Conflict if the key was rotated before or is no longer valid.
    """
    key = state.key(key_id)
    if key.replaced_by is not None:
        raise Conflict(f"{key_id} was rotated already: rotate {key.replaced_by}", param="id")
    if key.revoked or key.expired(now):
        raise Conflict(
            f"{key_id} is no longer valid: make a new one (`lorikeet keys create`)", param="id"
        )
    options = cast("KeyOptions", options_of(key))
    until = now + overlap_s
    if key.expires is not None:
        options["expires"] = now + (key.expires - key.created)
        until = min(until, key.expires)
    scopes = in_order(key.scopes)
    made = KeyCreated(id=new_id, tenant=key.tenant, scopes=scopes, sha256=new_sha256)
    changes = [*create_key(state, made, options)]
    changes.append(KeyReplaced(id=key_id, by=new_id, expires=until))
    if overlap_s == 0:  # at once, even if a gateway's clock is behind
        changes.append(KeyRevoked(id=key_id))
    return changes


def revoke_key(state: CatalogState, key_id: str) -> Changes:
    """Return the changes that revoke a key.

    Raises UnknownKey, and Conflict if no other admin key without an expiry date would be left.
    """
    if state.key(key_id).revoked:
        return ()
    if state.admin_keys() == {key_id}:
        raise Conflict(
            f"{key_id} is the last admin's key that never expires: rotate it "
            f"(`lorikeet keys rotate {key_id}`), or make another first "
            "(`lorikeet keys create --admin`) and revoke this one with it",
            param="id",
        )
    return (KeyRevoked(id=key_id),)


def in_order(scopes: Collection[Scope]) -> tuple[Scope, ...]:
    """Return each scope once, in order of name."""
    return tuple(sorted(set(scopes), key=lambda scope: scope.value))
