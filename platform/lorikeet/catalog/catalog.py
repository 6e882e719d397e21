"""The catalog: every operation that changes tenants, keys, adapters and pins.

A change is one optimistic loop: read the log's tail, check against the state, append. When
someone else appended first, the loop starts over, so no update is lost and nothing is decided on
stale knowledge. A crash leaves at most a blob that no entry names, or parts of a snapshot.
"""

import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self, TypeVar, Unpack, cast

from lorikeet.catalog.apply import apply_changes, apply_entries
from lorikeet.catalog.changes import CatalogCreated, KeyCreated, KeyOptionsSet, TenantOptionsSet
from lorikeet.catalog.names import DEFAULT_ALIAS, check_alias, check_name
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import (
    AdapterRecord,
    AliasShare,
    BlobFacts,
    KeyRecord,
    PinRecord,
    Scope,
    TenantRecord,
    VersionRecord,
    secret_sha256,
)
from lorikeet.catalog.rules import adapters as adapter_rules
from lorikeet.catalog.rules import pins as pin_rules
from lorikeet.catalog.rules import tenants_and_keys as tenant_rules
from lorikeet.catalog.rules.adapters import Changes, known_version
from lorikeet.catalog.rules.limits import (
    KeyLimitOptions,
    KeyOptions,
    TenantOptions,
    check_key_options,
    check_options,
    check_publish_options,
)
from lorikeet.catalog.rules.pins import PinOptions, pin_change
from lorikeet.catalog.rules.restore import restore_adapter, restore_version, retired_at
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.gc_protection import protect
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import Conflict, InvalidInput, ObjectNotFound

LONGEST_OVERLAP_S = 90 * 86400
_SECRET_PREFIX = "lk_"
_ATTEMPTS = 60  # with sixteen writers at once, one in fifty would give up
_LONGEST_PAUSE_S = 1.0

T = TypeVar("T")


def blob_key(digest: str) -> str:
    """Where the blob with this SHA-256 (64 hex digits) lies in the store."""
    return f"blobs/{digest[:2]}/{digest}"


class AdapterCatalog:
    """The catalog in one store, for any number of threads; other processes may write too.

    Each change refreshes first, names its `actor` for the audit trail, and raises Conflict if too
    many others keep changing the catalog meanwhile.
    """

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.reader = CatalogReader(store)
        self._clock = clock
        self._writing = threading.Lock()  # one process need not race with itself

    @classmethod
    def init(
        cls, store: ObjectStore, *, actor: str = "init", clock: Callable[[], float] = time.time
    ) -> Self:
        """Make the catalog of an empty store. Raises Conflict when there is one."""
        catalog = cls(store, clock)
        try:
            entry = catalog.reader.log.append(0, actor, clock(), [CatalogCreated()])
        except Conflict as error:
            raise Conflict(f"there already is a catalog at {store.url}") from error
        catalog.reader.advance([entry])
        return catalog

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
        return self.reader.ask(lambda state: state.key(change.id)), secret

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
        return self.reader.ask(lambda state: state.key(new_id)), secret

    def revoke_key(self, key_id: str, *, actor: str) -> KeyRecord:
        """Make a key invalid for ever; again is fine.

        Raises UnknownKey, and Conflict for the last admin's key that never expires.
        """
        return self._commit(actor, lambda state: tenant_rules.revoke_key(state, key_id)).key(key_id)

    def register(
        self,
        tenant: str,
        name: str,
        blob: Path,
        facts: BlobFacts,
        *,
        shared: bool | None = None,
        promote: bool = False,
        alias: str | None = None,
        since: int | None = None,
        actor: str,
    ) -> VersionRecord:
        """Upload a validated blob and make it the adapter's next version.

        The first version becomes prod, later ones with `promote`, or get another `alias`. A blob
        that already is a usable version of this adapter gives that version. shared None leaves it
        as it is (at first not shared). since: the entry of the log after which it was decided.
        Raises InvalidInput, UnknownTenant, and Conflict beyond the tenant's limits, or where the
        adapter was retired since.
        """
        check_name(tenant, "tenant")
        check_name(name, "name")
        alias = DEFAULT_ALIAS if promote else alias and check_alias(alias)

        def decide(state: CatalogState) -> Changes:
            return adapter_rules.register(
                state, tenant, name, facts, shared=shared, alias=alias, since=since
            )

        self.reader.refresh()
        self.reader.ask(decide)  # before a long upload
        key = blob_key(facts.digest)
        protect(self.store, key, lambda: self.store.put_file(key, blob))
        after = self._commit(actor, decide)
        version = after.adapter(tenant, name).with_digest(facts.digest)
        assert version is not None
        return version

    def promote(
        self,
        tenant: str,
        name: str,
        version: int,
        alias: str = DEFAULT_ALIAS,
        expect: int | None = None,
        *,
        actor: str,
    ) -> AdapterRecord:
        """Point an alias, new or not, to a version.

        expect: the version it must point to until now. Raises UnknownModel, Conflict.
        """
        check_alias(alias)
        after = self._commit(
            actor, lambda state: adapter_rules.promote(state, tenant, name, version, alias, expect)
        )
        return after.adapter(tenant, name)

    def give_share(
        self,
        tenant: str,
        name: str,
        version: int,
        fraction: float,
        alias: str = DEFAULT_ALIAS,
        expect: int | None = None,
        *,
        actor: str,
    ) -> AdapterRecord:
        """Give a fraction of an alias's requests, 0 < fraction < 1, to a second version.

        Promoting either version ends it. Raises InvalidInput, UnknownModel, NotFound, Conflict.
        """
        check_alias(alias)
        if not 0 < fraction < 1:
            raise InvalidInput(f"share={fraction}: want more than 0 and less than 1", param="share")
        share = AliasShare(version, fraction)
        after = self._commit(
            actor, lambda state: adapter_rules.give_share(state, tenant, name, share, alias, expect)
        )
        return after.adapter(tenant, name)

    def rollback(
        self, tenant: str, name: str, alias: str = DEFAULT_ALIAS, *, actor: str
    ) -> AdapterRecord:
        """Take an alias's share back, or point it to what it pointed to before; again goes on.

        Retired versions are passed over. Raises UnknownModel, NotFound, and Conflict when there
        is nothing to go back to or someone moves the alias at the same moment.
        """
        self.reader.refresh()
        seen = self.reader.ask(lambda state: state.adapter(tenant, name)).aliases.get(alias)
        after = self._commit(
            actor, lambda state: adapter_rules.rollback(state, tenant, name, alias, expect=seen)
        )
        return after.adapter(tenant, name)

    def retire(
        self, tenant: str, name: str, version: int | None = None, *, actor: str
    ) -> AdapterRecord:
        """End the use of one version, or with None of the adapter, its aliases and its pin.

        Requests in flight finish. An adapter that is registered again later is private unless it
        is shared anew. A version that an alias points to is refused with Conflict.
        Raises UnknownModel.
        """
        after = self._commit(
            actor, lambda state: adapter_rules.retire(state, tenant, name, version)
        )
        return after.adapter(tenant, name)

    def restore(
        self, tenant: str, name: str, version: int | None = None, *, actor: str
    ) -> AdapterRecord:
        """Undo the retirement of one version, or with None of the adapter as it was before.

        Raises UnknownModel, and Conflict when the adapter is not retired, or so long ago that a
        blob was collected.
        """
        self.reader.refresh()
        record = self.reader.ask(lambda state: state.adapter(tenant, name))
        if version is not None:
            self._claim([known_version(record, version)])
            after = self._commit(actor, lambda state: restore_version(state, tenant, name, version))
            return after.adapter(tenant, name)
        was = self.reader.history.as_of(retired_at(record) - 1)
        before, pin = was.ask(lambda s: (s.adapter(tenant, name), s.pin_of(tenant, name)))
        self._claim([version for version in before.versions if not version.retired])
        after = self._commit(
            actor, lambda state: restore_adapter(state, before, pin, self._clock())
        )
        return after.adapter(tenant, name)

    def pin(
        self, tenant: str, name: str | None, *, actor: str, **options: Unpack[PinOptions]
    ) -> PinRecord:
        """Promise that an adapter, or with None all of a tenant, stays resident; replaces its pin.

        Raises InvalidInput, UnknownModel, UnknownTenant, and Conflict beyond the tenant's budget.
        """
        now = self._clock()
        change = pin_change(tenant, name, now, **options)
        after = self._commit(actor, lambda state: pin_rules.pin(state, change, now))
        pin = after.pin_of(tenant, name)
        assert pin is not None
        return pin

    def if_pinned(
        self,
        tenant: str,
        name: str | None,
        question: Callable[[CatalogState, CatalogState], T],
        **options: Unpack[PinOptions],
    ) -> T:
        """The answer of the states now and as such a pin would leave it, which is not made.

        Raises what `pin` raises.
        """
        now = self._clock()
        change = pin_change(tenant, name, now, **options)

        def ask(state: CatalogState) -> T:
            return question(state, apply_changes(state, pin_rules.pin(state, change, now), now))

        self.reader.refresh()
        return self.reader.ask(ask)

    def unpin(self, tenant: str, name: str | None, *, actor: str) -> None:
        """Take the pin of an adapter, or with None of a tenant, away. Raises NotFound."""
        self._commit(actor, lambda state: pin_rules.unpin(state, tenant, name))

    def _commit(self, actor: str, decide: Callable[[CatalogState], Changes]) -> CatalogState:
        """Append what `decide` answers; the state right after it, or as it is without changes."""
        asked_s = time.monotonic()
        with self._writing:
            for attempt in range(_ATTEMPTS):
                self.reader.refresh(asked_s)
                state, changes = self.reader.ask(lambda state: (state, decide(state)))
                if not changes:
                    return state
                try:
                    entry = self.reader.log.append(state.seq, actor, self._clock(), changes)
                except Conflict:
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.05 * 2**attempt)))
                    continue
                self.reader.advance([entry])
                return apply_entries(state, [entry])
        raise Conflict(
            f"others changed the catalog first, {_ATTEMPTS} times in a row: try again later"
        )

    def _claim(self, versions: Sequence[VersionRecord]) -> None:
        for version in versions:
            try:
                protect(self.store, blob_key(version.digest))
            except ObjectNotFound as error:
                raise Conflict(
                    f"the blob of version {version.version}, {version.digest}, was retired so "
                    "long ago that it is collected: register it again"
                ) from error


def _new_secret() -> str:
    """Make a secret that is safe in a header and easy to find in a leaked file."""
    return _SECRET_PREFIX + secrets.token_urlsafe(32)


def _new_key_id() -> str:
    """Make an id to name a key by; it is no secret."""
    return "key-" + secrets.token_hex(8)
