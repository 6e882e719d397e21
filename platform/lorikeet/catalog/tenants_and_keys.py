"""Changing tenants and keys."""

import secrets
from collections.abc import Collection
from typing import Unpack, cast

from lorikeet.catalog.log.changes import KeyCreated, KeyOptionsSet, TenantOptionsSet
from lorikeet.catalog.names import check_name
from lorikeet.catalog.records import KeyRecord, Scope, TenantRecord, secret_sha256
from lorikeet.catalog.rules import tenants_and_keys as tenant_rules
from lorikeet.catalog.rules.limits import (
    KeyLimitOptions,
    KeyOptions,
    TenantOptions,
    check_key_options,
    check_options,
    check_publish_options,
)
from lorikeet.catalog.writer import CatalogWriter
from lorikeet.errors import InvalidInput

LONGEST_OVERLAP_S = 90 * 86400
_SECRET_PREFIX = "lk_"


class TenantCatalog(CatalogWriter):
    """The part of the catalog's operations that is about tenants and keys; see AdapterCatalog."""

    def create_tenant(
        self, name: str, *, actor: str, **options: Unpack[TenantOptions]
    ) -> TenantRecord:
        """Make a tenant. Raises InvalidInput, and Conflict when there is one."""
        check_name(name, "tenant")
        check_options(options)
        after = self._commit(actor, lambda state: tenant_rules.create_tenant(state, name, options))
        return after.tenant(name)

    def limit_tenant(
        self, name: str, *, actor: str, **options: Unpack[TenantOptions]
    ) -> TenantRecord:
        """Change some of a tenant's options; the others stay. Raises InvalidInput, UnknownTenant.

        What it has beyond a new limit stays: pins, though a plan keeps no more than fits, and
        adapters.
        """
        check_options(options)
        change = TenantOptionsSet(tenant=name, options=options)
        return self._commit(actor, lambda state: tenant_rules.limit_tenant(state, change)).tenant(
            name
        )

    def create_key(
        self,
        tenant: str | None,
        scopes: Collection[Scope],
        *,
        actor: str,
        **options: Unpack[KeyOptions],
    ) -> tuple[KeyRecord, str]:
        """Make a key; its secret is in this answer and nowhere else.

        tenant None: an administrator's key. Raises InvalidInput, UnknownTenant.
        """
        if not scopes:
            raise InvalidInput("scopes=[]: want at least one scope", param="scopes")
        if tenant is None and Scope.INFER in scopes:
            raise InvalidInput("scope 'infer' is for a tenant's key: name one", param="scopes")
        check_key_options(tenant, options, self._clock())
        check_publish_options(tenant, scopes, options.get("adapters", ()))
        secret = _new_secret()
        change = KeyCreated(
            id=_new_key_id(),
            tenant=tenant,
            scopes=tenant_rules.in_order(scopes),
            sha256=secret_sha256(secret),
        )
        self._commit(actor, lambda state: tenant_rules.create_key(state, change, options))
        return self.ask(lambda state: state.key(change.id)), secret

    def limit_key(
        self, key_id: str, *, actor: str, **options: Unpack[KeyLimitOptions]
    ) -> KeyRecord:
        """Change some of a key's own limits; the others stay.

        Raises InvalidInput, UnknownKey, and Conflict for a revoked key.
        """
        check_options(options)
        change = KeyOptionsSet(id=key_id, options=cast("KeyOptions", options))
        return self._commit(actor, lambda state: tenant_rules.limit_key(state, change)).key(key_id)

    def rotate_key(self, key_id: str, overlap_s: float, *, actor: str) -> tuple[KeyRecord, str]:
        """Make a key with the owner, scopes, limits, name and lifetime of another, in its place.

        The old key works for `overlap_s` seconds more, 0 to LONGEST_OVERLAP_S. The new secret is in
        this answer and nowhere else. Raises InvalidInput, UnknownKey, and Conflict for a key that
        is valid no more or was rotated before.
        """
        if not 0 <= overlap_s <= LONGEST_OVERLAP_S:
            raise InvalidInput(
                f"overlap_s={overlap_s}: want 0 to {LONGEST_OVERLAP_S} seconds", param="overlap_s"
            )
        now, new_id, secret = self._clock(), _new_key_id(), _new_secret()
        sha256 = secret_sha256(secret)
        self._commit(
            actor,
            lambda state: tenant_rules.rotate_key(state, key_id, new_id, sha256, now, overlap_s),
        )
        return self.ask(lambda state: state.key(new_id)), secret

    def revoke_key(self, key_id: str, *, actor: str) -> KeyRecord:
        """Make a key invalid for ever; again is fine.

        Raises UnknownKey, and Conflict for the last admin's key that never expires.
        """
        return self._commit(actor, lambda state: tenant_rules.revoke_key(state, key_id)).key(key_id)


def _new_secret() -> str:
    """Make a secret that is safe in a header and easy to find in a leaked file."""
    return _SECRET_PREFIX + secrets.token_urlsafe(32)


def _new_key_id() -> str:
    """Make an id to name a key by; it is no secret."""
    return "key-" + secrets.token_hex(8)
