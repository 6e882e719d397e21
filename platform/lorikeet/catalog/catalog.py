"""The catalog: the state as last read, and every operation that changes adapters and pins."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, Unpack

from lorikeet.catalog.history import History
from lorikeet.catalog.log.apply import apply_changes
from lorikeet.catalog.names import DEFAULT_ALIAS, check_alias, check_name
from lorikeet.catalog.records import (
    AdapterRecord,
    AliasShare,
    BlobFacts,
    PinRecord,
    VersionRecord,
)
from lorikeet.catalog.rules import adapters as adapter_rules
from lorikeet.catalog.rules.adapters import known_version
from lorikeet.catalog.rules.pins import PinOptions, pin_change
from lorikeet.catalog.rules.restore import restore_adapter, restore_version, retired_at
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.gc_protection import protect
from lorikeet.catalog.tenants_and_keys import TenantCatalog
from lorikeet.errors import Conflict, InvalidInput, ObjectNotFound

T = TypeVar("T")


def blob_key(digest: str) -> str:
    """Where the blob with this SHA-256 (64 hex digits) lies in the store."""
    return f"blobs/{digest[:2]}/{digest}"


class AdapterCatalog(TenantCatalog):
    """The catalog in one store, for any number of threads; other processes may write too.

    Each change refreshes first, names its `actor` for the audit trail, and raises Conflict if too
    many others keep changing the catalog meanwhile.
    """

    @property
    def history(self) -> History:
        """The catalog's history up to the state as last read."""
        return History(self._log, self._snapshots, self.state.seq)

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

        def decide(state: CatalogState) -> adapter_rules.Changes:
            return adapter_rules.register(
                state, tenant, name, facts, shared=shared, alias=alias, since=since
            )

        self.refresh()
        self.ask(decide)  # before a long upload
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
        self.refresh()
        seen = self.ask(lambda state: state.adapter(tenant, name)).aliases.get(alias)
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
        self.refresh()
        record = self.ask(lambda state: state.adapter(tenant, name))
        if version is not None:
            self._claim([known_version(record, version)])
            after = self._commit(actor, lambda state: restore_version(state, tenant, name, version))
            return after.adapter(tenant, name)
        was = self.history.as_of(retired_at(record) - 1)
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
        after = self._commit(actor, lambda state: adapter_rules.pin(state, change, now))
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
            return question(state, apply_changes(state, adapter_rules.pin(state, change, now), now))

        self.refresh()
        return self.ask(ask)

    def unpin(self, tenant: str, name: str | None, *, actor: str) -> None:
        """Take the pin of an adapter, or with None of a tenant, away. Raises NotFound."""
        self._commit(actor, lambda state: adapter_rules.unpin(state, tenant, name))

    def _claim(self, versions: Sequence[VersionRecord]) -> None:
        for version in versions:
            try:
                protect(self.store, blob_key(version.digest))
            except ObjectNotFound as error:
                raise Conflict(
                    f"the blob of version {version.version}, {version.digest}, was retired so "
                    "long ago that it is collected: register it again"
                ) from error
