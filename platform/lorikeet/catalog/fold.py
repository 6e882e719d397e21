"""How log entries turn one state into the next: a pure function."""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from lorikeet.catalog.changes import (
    AdapterRetired,
    AdapterShared,
    AliasMoved,
    AliasRolledBack,
    CatalogCreated,
    Change,
    Entry,
    KeyCreated,
    KeyRevoked,
    Pinned,
    TenantSaved,
    Unpinned,
    VersionRegistered,
    VersionRetired,
)
from lorikeet.catalog.records import (
    AdapterRecord,
    KeyRecord,
    PinRecord,
    TenantRecord,
    VersionRecord,
)
from lorikeet.catalog.state import CatalogState


def fold(state: CatalogState, entries: Iterable[Entry]) -> CatalogState:
    """The state after these entries, which follow on `state.seq` without a gap.

    Unchanged adapters are shared with `state`, however many entries there are.
    """
    draft = _Draft(state)
    for entry in entries:
        assert entry.seq == draft.seq + 1, f"entry {entry.seq} after {draft.seq}"
        for change in entry.changes:
            draft.apply(change, entry)
        draft.seq = entry.seq
    return draft.finish()


class _Draft:
    """A state in the making: one copy of each table, and of each touched tenant's adapters."""

    def __init__(self, state: CatalogState) -> None:
        self.seq = state.seq
        self._tenants = dict(state.tenant_records)
        self._keys = dict(state.key_records)
        self._key_ids = dict(state.key_ids)
        self._adapters = dict(state.adapter_records)
        self._own: dict[str, dict[str, AdapterRecord]] = {}  # tenants whose table is copied
        self._shared = set(state.shared)
        self._pins = dict(state.pin_records)

    def apply(self, change: Change, entry: Entry) -> None:
        match change:
            case CatalogCreated():
                pass
            case TenantSaved():
                self._save_tenant(change, entry.time)
            case KeyCreated():
                self._create_key(change, entry.time)
            case KeyRevoked():
                self._keys[change.id] = replace(self._keys[change.id], revoked=True)
            case VersionRegistered():
                self._register(change, entry.time)
            case AdapterShared():
                self._share(change)
            case AliasMoved():
                self._put(_moved(self._adapter(change), change))
            case AliasRolledBack():
                self._put(_rolled_back(self._adapter(change), change))
            case VersionRetired():
                self._put(_version_retired(self._adapter(change), change.version))
            case AdapterRetired():
                self._put(_retired(self._adapter(change)))
                self._shared.discard((change.tenant, change.name))
                self._pins.pop((change.tenant, change.name), None)
            case Pinned():
                self._pin(change, entry)
            case Unpinned():
                self._pins.pop((change.tenant, change.name), None)
            case _:
                assert_never(change)

    def finish(self) -> CatalogState:
        return CatalogState(
            seq=self.seq,
            tenant_records=self._tenants,
            key_records=self._keys,
            key_ids=self._key_ids,
            adapter_records=self._adapters,
            shared=frozenset(self._shared),
            pin_records=self._pins,
        )

    def _adapter(
        self,
        change: AliasMoved | AliasRolledBack | AdapterShared | VersionRetired | AdapterRetired,
    ) -> AdapterRecord:
        return self._adapters[change.tenant][change.name]

    def _put(self, record: AdapterRecord) -> None:
        own = self._own.get(record.tenant)
        if own is None:
            own = self._own[record.tenant] = dict(self._adapters.get(record.tenant, {}))
            self._adapters[record.tenant] = own
        own[record.name] = record

    def _save_tenant(self, change: TenantSaved, time: float) -> None:
        before = self._tenants.get(change.name)
        created = before.created if before else time
        self._tenants[change.name] = TenantRecord(change.name, change.max_concurrent, created)

    def _create_key(self, change: KeyCreated, time: float) -> None:
        scopes = frozenset(change.scopes)
        self._keys[change.id] = KeyRecord(change.id, change.tenant, scopes, change.sha256, time)
        self._key_ids[change.sha256] = change.id

    def _register(self, change: VersionRegistered, time: float) -> None:
        record = self._adapters.get(change.tenant, {}).get(change.name)
        record = record or AdapterRecord(change.tenant, change.name)
        version = VersionRecord(
            version=change.version,
            digest=change.digest,
            size_bytes=change.size_bytes,
            max_rank=change.max_rank,
            base_model=change.base_model,
            created=time,
        )
        self._put(replace(record, versions=(*record.versions, version)))

    def _share(self, change: AdapterShared) -> None:
        self._put(replace(self._adapter(change), shared=change.shared))
        if change.shared:
            self._shared.add((change.tenant, change.name))
        else:
            self._shared.discard((change.tenant, change.name))

    def _pin(self, change: Pinned, entry: Entry) -> None:
        self._pins[change.tenant, change.name] = PinRecord(
            tenant=change.tenant,
            name=change.name,
            selector=change.selector,
            tier=change.tier,
            replicas=change.replicas,
            reason=change.reason,
            expires=change.expires,
            created=entry.time,
            actor=entry.actor,
        )


def _moved(record: AdapterRecord, change: AliasMoved) -> AdapterRecord:
    history = record.alias_history.get(change.alias, ())
    if change.alias in record.aliases:
        history = (*history, record.aliases[change.alias])
    return _pointed(record, change.alias, change.version, history)


def _rolled_back(record: AdapterRecord, change: AliasRolledBack) -> AdapterRecord:
    history = record.alias_history[change.alias]
    at = len(history) - 1 - history[::-1].index(change.version)
    return _pointed(record, change.alias, change.version, history[:at])


def _pointed(
    record: AdapterRecord, alias: str, version: int, history: tuple[int, ...]
) -> AdapterRecord:
    return replace(
        record,
        aliases={**record.aliases, alias: version},
        alias_history={**record.alias_history, alias: history},
    )


def _version_retired(record: AdapterRecord, number: int) -> AdapterRecord:
    versions = (replace(v, retired=True) if v.version == number else v for v in record.versions)
    return replace(record, versions=tuple(versions))


def _retired(record: AdapterRecord) -> AdapterRecord:
    versions = tuple(replace(version, retired=True) for version in record.versions)
    return replace(record, shared=False, versions=versions, aliases={}, alias_history={})
