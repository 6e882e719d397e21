"""The catalog: every operation that changes tenants, keys, adapters and pins.

Every change is one optimistic loop: read the log's tail, check the change against the state, append
an entry. If another writer appended first, the loop starts over: no update is lost, and no decision
rests on a stale state.
"""

import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self, TypeVar, Unpack, cast

from lorikeet.catalog.apply import apply_changes, apply_entries
from lorikeet.catalog.changes import (
    CatalogCreated,
    Change,
    Entry,
    KeyCreated,
    KeyOptionsSet,
    TenantOptionsSet,
)
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
    check_adapter_patterns,
    check_key_options,
    check_options,
)
from lorikeet.catalog.rules.pins import PinOptions, pin_change
from lorikeet.catalog.rules.restore import restore_adapter, restore_version, retired_at
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.conditional_writes import check_conditional_writes
from lorikeet.catalog.store.gc_protection import protect
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import Conflict, InvalidInput, ObjectNotFound
from lorikeet.request_defaults import RequestDefaults

LONGEST_OVERLAP_S = 90 * 86400
"""Limit on the seconds for which a rotated key stays valid beside the key that replaces it."""
_SECRET_PREFIX = "lk_"
_ATTEMPTS = 60  # with 16 concurrent writers, 1 in 50 gives up
_LONGEST_PAUSE_S = 1.0
_CHECK_EVERY_S = 600.0  # versioning may be enabled on a bucket at any time

T = TypeVar("T")


def blob_key(digest: str) -> str:
    """Return the store's key of the adapter blob with this SHA-256 (64 hex digits)."""
    return f"blobs/{digest[:2]}/{digest}"


class AdapterCatalog:
    """The catalog in one store: tenants, keys, adapters and pins, as a log of changes.

    Thread-safe; other processes may write to the store too.

    Each operation refreshes `reader` first, and raises Conflict if other writers appended to the
    log first in every attempt, and StoreRefused if the store ignores conditional writes. The store
    is checked for these before the first change, and again before changes ten minutes or more after
    a check.

    reader: reads the log and keeps the newest state.
    clock: function that returns the time in Unix seconds.
    In every operation, actor: author that the log names, such as a key's id.
    """

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.reader = CatalogReader(store)
        self._clock = clock
        self._writing = threading.Lock()  # spares races between threads of this process
        self._checked_s = -math.inf  # time.monotonic() of the last check of conditional writes

    @classmethod
    def init(
        cls, store: ObjectStore, *, actor: str = "init", clock: Callable[[], float] = time.time
    ) -> Self:
        """Create the catalog in an empty store.

        actor: author that the log names.
        clock: function that returns the time in Unix seconds.

        Raises Conflict if the store holds a catalog already, StoreRefused if the store ignores
        conditional writes.
        """
        catalog = cls(store, clock)
        try:
            entry = catalog._append(0, actor, [CatalogCreated()])
        except Conflict as error:
            raise Conflict(f"there already is a catalog at {store.url}") from error
        catalog.reader.advance([entry])
        return catalog

    def create_tenant(
        self, name: str, *, actor: str, **options: Unpack[TenantOptions]
    ) -> TenantRecord:
        """Create a tenant.

        options: rate limits, budgets, weight, and limits on adapters and pins (TenantOptions).

        Raises InvalidInput if its name or an option is not allowed, Conflict if the name is taken.
        """
        check_name(name, "tenant")
        check_options(options)
        after = self._commit(actor, lambda state: tenant_rules.create_tenant(state, name, options))
        return after.tenant(name)

    def limit_tenant(
        self, name: str, *, actor: str, **options: Unpack[TenantOptions]
    ) -> TenantRecord:
        """Change the given options of a tenant.

        Adapters and pins beyond a new limit stay registered, but placement keeps only the pins that
        fit the budget.

        options: rate limits, budgets, weight, and limits on adapters and pins (TenantOptions).

        Raises InvalidInput if an option is not allowed, UnknownTenant if there is no such tenant.
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
        """Create a key and return it with its secret, which is stored nowhere.

        tenant: owner of the key; None makes an admin's key.
        scopes: permissions of the key.
        options: limits, priority, name, expiry and usable adapters of the key (KeyOptions).

        Raises InvalidInput if a scope or an option is not allowed, UnknownTenant if there is no
        such tenant.
        """
        if not scopes:
            raise InvalidInput("scopes=[]: want at least one scope", param="scopes")
        if tenant is None and Scope.INFER in scopes:
            raise InvalidInput("scope 'infer' is for a tenant's key: name a tenant", param="scopes")
        check_key_options(tenant, options, self._clock())
        check_adapter_patterns(tenant, scopes, options.get("adapters", ()))
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
        """Change the given limits of a key.

        options: rate limits and priority (KeyLimitOptions).

        Raises InvalidInput if a limit is not allowed, UnknownKey if there is no such key, and
        Conflict if the key is revoked.
        """
        check_options(options)
        change = KeyOptionsSet(id=key_id, options=cast("KeyOptions", options))
        return self._commit(actor, lambda state: tenant_rules.limit_key(state, change)).key(key_id)

    def rotate_key(self, key_id: str, overlap_s: float, *, actor: str) -> tuple[KeyRecord, str]:
        """Replace a key by a new one with the same owner, scopes, limits, name and lifetime.

        Returns the new key with its secret, which is stored nowhere.

        overlap_s: seconds for which the old key stays valid, 0 to LONGEST_OVERLAP_S.

        Raises InvalidInput if overlap_s is out of these bounds, UnknownKey, and Conflict if the old
        key is no longer valid or was rotated before.
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
        """Make a key invalid for ever. Idempotent.

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
        defaults: RequestDefaults | None = None,
        shared: bool | None = None,
        promote: bool = False,
        alias: str | None = None,
        since: int | None = None,
        actor: str,
    ) -> VersionRecord:
        """Upload a validated blob and make it the adapter's next version.

        Returns the existing version if the blob is already a usable version of this adapter with
        the same request defaults. The alias `prod` is pointed to an adapter's only usable version.

        blob: file with the validated bytes.
        facts: facts about the blob that validation has found.
        defaults: the version's own request defaults; None: the base model's.
        shared: open the adapter to every tenant; None keeps the present setting, which is False for
            a new adapter.
        promote: point the alias `prod` to the version.
        alias: alias to point to the version, unless `promote` is set.
        since: number of the newest catalog entry that the caller knew when it decided to register;
            None: the newest now.

        Raises InvalidInput for a name that is not allowed, UnknownTenant, and Conflict beyond the
        tenant's limits, or if the adapter was retired after `since`.
        """
        check_name(tenant, "tenant")
        check_name(name, "name")
        alias = DEFAULT_ALIAS if promote else alias and check_alias(alias)

        def decide(state: CatalogState) -> Changes:
            return adapter_rules.register(
                state,
                tenant,
                name,
                facts,
                defaults=defaults,
                shared=shared,
                alias=alias,
                since=since,
            )

        self.reader.refresh()
        self.reader.ask(decide)  # raises before a long upload
        key = blob_key(facts.digest)
        protect(self.store, key, lambda: self.store.put_file(key, blob))
        after = self._commit(actor, decide)
        version = after.adapter(tenant, name).registered(facts.digest, defaults)
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
        """Point an alias to a version; creates the alias if needed.

        expect: version that the alias must point to now; None: any.

        Raises InvalidInput for an invalid alias, UnknownModel for an unknown version, and Conflict
        if the version is retired or the alias does not point to `expect`.
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
        """Route a fraction of an alias's requests to a second version.

        Promoting either version ends the share.

        fraction: 0 < fraction < 1.
        expect: version that the alias must point to now; None: any.

        Raises InvalidInput for an invalid alias or fraction, UnknownModel for an unknown version,
        NotFound for an unknown alias, and Conflict if the version is retired or the alias already
        points to it, or does not point to `expect`.
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
        """End an alias's share (a second version's fraction of its requests); without a share,
        point the alias to its previous usable version.

        A repeated rollback goes back further.
        Raises UnknownModel, NotFound for an unknown alias, and Conflict if there is no version to
        go back to or another writer moves the alias at the same moment.
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
        """Retire one version, or the whole adapter with its aliases and its pin.

        Requests in flight finish. If a new version is registered later, the adapter is private
        until it is shared again.

        version: version to retire; None retires the adapter.

        Raises UnknownModel, and Conflict if an alias points to the version.
        """
        after = self._commit(
            actor, lambda state: adapter_rules.retire(state, tenant, name, version)
        )
        return after.adapter(tenant, name)

    def restore(
        self, tenant: str, name: str, version: int | None = None, *, actor: str
    ) -> AdapterRecord:
        """Undo the retirement of one version, or of the whole adapter with its aliases and pin.

        version: version to restore; None restores the adapter as it was before its retirement.

        Raises UnknownModel, and Conflict if the adapter is not retired or a blob has been garbage
        collected since.
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
        """Pin an adapter, or all adapters of a tenant, to a tier; replaces an earlier pin.

        name: adapter to pin; None pins all adapters of the tenant.
        options: tier, replicas, priority, expiry and other options of the pin (PinOptions).

        Raises InvalidInput if an option is not allowed, UnknownModel, UnknownTenant, and Conflict
        beyond the tenant's budget, or if the base model has another draft.
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
        """Answer a question about the states before and after a pin, without making the pin.

        question: called with the state now and the state that the pin would produce.

        Raises as `pin` does.
        """
        now = self._clock()
        change = pin_change(tenant, name, now, **options)

        def compare(state: CatalogState) -> T:
            return question(state, apply_changes(state, pin_rules.pin(state, change, now), now))

        self.reader.refresh()
        return self.reader.ask(compare)

    def unpin(self, tenant: str, name: str | None, *, actor: str) -> None:
        """Remove the pin of an adapter, or of a tenant if `name` is None. Raises NotFound if there
        is none.
        """
        self._commit(actor, lambda state: pin_rules.unpin(state, tenant, name))

    def remove_prompt(self, tenant: str, name: str, *, actor: str) -> None:
        """Remove the system prompt of an adapter's pin, and keep the pin. Raises NotFound if there
        is no pin with a prompt.
        """
        self._commit(actor, lambda state: pin_rules.remove_prompt(state, tenant, name))

    def _commit(self, actor: str, decide: Callable[[CatalogState], Changes]) -> CatalogState:
        """Append the changes that `decide` derives from the newest state; return the next state.

        Nothing is appended if there are no changes. Raises Conflict if other writers appended first
        in all _ATTEMPTS attempts.
        """
        asked_s = time.monotonic()
        with self._writing:
            for attempt in range(_ATTEMPTS):
                self.reader.refresh(asked_s)
                state, changes = self.reader.ask(lambda state: (state, decide(state)))
                if not changes:
                    return state
                try:
                    entry = self._append(state.seq, actor, changes)
                except Conflict:
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.05 * 2**attempt)))
                    continue
                self.reader.advance([entry])
                return apply_entries(state, [entry])
        raise Conflict(
            f"others changed the catalog first, {_ATTEMPTS} times in a row: try again later"
        )

    def _append(self, after: int, actor: str, changes: Sequence[Change]) -> Entry:
        now_s = time.monotonic()
        if now_s > self._checked_s + _CHECK_EVERY_S:
            check_conditional_writes(self.store)
            self._checked_s = now_s
        return self.reader.log.append(after, actor, self._clock(), changes)

    def _claim(self, versions: Sequence[VersionRecord]) -> None:
        for version in versions:
            try:
                protect(self.store, blob_key(version.digest))
            except ObjectNotFound as error:
                raise Conflict(
                    f"version {version.version} was retired, and its blob {version.digest} is "
                    "garbage collected: register it again"
                ) from error


def _new_secret() -> str:
    """Make a secret that is valid in a header and easy to find in a leaked file."""
    return _SECRET_PREFIX + secrets.token_urlsafe(32)


def _new_key_id() -> str:
    """Make a key's id, which is not secret."""
    return "key-" + secrets.token_hex(8)
