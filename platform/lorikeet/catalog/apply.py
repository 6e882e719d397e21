"""Application of log entries to a state: pure functions that return the next state."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, assert_never

from lorikeet.catalog.changes import (
    AdapterChange,
    AdapterRetired,
    AdapterShared,
    AliasMoved,
    AliasRolledBack,
    AnyAdapterChange,
    CatalogCreated,
    Change,
    DefaultsSet,
    Entry,
    KeyCreated,
    KeyOptionsSet,
    KeyReplaced,
    KeyRevoked,
    Pinned,
    ShareEnded,
    ShareGiven,
    TenantCreated,
    TenantOptionsSet,
    Unpinned,
    VersionRegistered,
    VersionRestored,
    VersionRetired,
)
from lorikeet.catalog.records import (
    AdapterRecord,
    AliasShare,
    KeyRecord,
    PinKey,
    PinRecord,
    Scope,
    TenantRecord,
    TenantState,
    VersionRecord,
)
from lorikeet.catalog.rules.limits import with_options
from lorikeet.catalog.state import (
    COMMON,
    CatalogState,
    Partition,
    UnreadPartition,
    partition_of,
)

V = TypeVar("V")


def apply_entries(state: CatalogState, entries: Iterable[Entry]) -> CatalogState:
    """Return the catalog's state after these entries of its log.

    Copies only the partitions (parts of the state) that the entries change; the others are shared
    with `state`.

    state: the state before the entries.
    entries: consecutive entries, the first of which has the number `state.seq` + 1.
    """
    seq, time = state.seq, state.time
    touching: dict[int, list[Entry]] = {}
    for entry in entries:
        assert entry.seq == seq + 1, f"entry {entry.seq} after {seq}"
        seq, time = entry.seq, entry.time
        for number in {number for change in entry.changes for number in _partitions_of(change)}:
            touching.setdefault(number, []).append(entry)
    partitions = list(state.partitions)
    for number, new in touching.items():
        held = partitions[number]
        if isinstance(held, UnreadPartition):
            partitions[number] = UnreadPartition(held.digest, (*held.pending, *new))
        else:
            partitions[number] = apply_to_partition(held, number, new)
    return CatalogState(seq, time, tuple(partitions))


def apply_changes(state: CatalogState, changes: Iterable[Change], time: float) -> CatalogState:
    """Return the state that these changes would produce, without committing them.

    time: time of the changes, Unix seconds.
    """
    imagined = Entry(seq=state.seq + 1, nonce="", actor="", time=time, changes=tuple(changes))
    return apply_entries(state, [imagined])


def apply_to_partition(partition: Partition, number: int, entries: Iterable[Entry]) -> Partition:
    """Return a partition after applying all changes in these log entries that affect it.

    number: the partition's number.
    """
    draft = _Draft(partition, number)
    for entry in entries:
        for change in entry.changes:
            if number in _partitions_of(change):
                draft.apply(change, entry)
    return draft.finish()


def _partitions_of(change: Change) -> Collection[int]:
    """Return the numbers of the partitions that a change affects."""
    match change:
        case CatalogCreated():
            return ()
        case TenantCreated():
            return (partition_of(change.name),)
        case KeyCreated():
            owner = COMMON if change.tenant is None else partition_of(change.tenant)
            return (partition_of(change.id), partition_of(change.sha256), owner)
        case KeyOptionsSet() | KeyReplaced() | KeyRevoked():
            return (partition_of(change.id), COMMON)
        case AdapterShared() | AdapterRetired():
            return (partition_of(change.tenant), COMMON)
        case Pinned() | Unpinned():
            return (COMMON,)
        case _:
            return (partition_of(change.tenant),)


class _Draft:
    """Mutable copy of the tables of a partition (a part of the catalog's state).

    A tenant's table of adapters is copied only once a log entry changes it.
    """

    def __init__(self, partition: Partition, number: int) -> None:
        self._partition = partition
        self._number = number
        self._tenants = dict(partition.tenants)
        self._own: dict[str, dict[str, AdapterRecord]] = {}  # copied tables of changed tenants
        self._keys = dict(partition.keys)
        self._key_ids = dict(partition.key_ids)
        self._shared = set(partition.shared)
        self._pins = dict(partition.pins)
        self._admin_keys = set(partition.admin_keys)

    def apply(self, change: Change, entry: Entry) -> None:
        if self._number == COMMON:
            self._apply_to_all_tenants(change, entry)
        else:
            self._apply(change, entry)

    def finish(self) -> Partition:
        return Partition(
            self._tenants,
            self._keys,
            self._key_ids,
            frozenset(self._shared),
            self._pins,
            frozenset(self._admin_keys),
        )

    def _apply(self, change: Change, entry: Entry) -> None:
        match change:
            case TenantCreated(name=name):
                self._tenants[name] = TenantState(TenantRecord(name, entry.time))
            case TenantOptionsSet(tenant=tenant, options=options):
                before = self._tenant_state(tenant)
                self._tenants[tenant] = replace(before, record=with_options(before.record, options))
            case KeyCreated():
                self._create_key(change, entry.time)
            case KeyOptionsSet():
                self._keys[change.id] = with_options(self._keys[change.id], change.options)
            case KeyReplaced(by=by, expires=expires):
                key = self._keys[change.id]
                self._keys[change.id] = replace(key, replaced_by=by, expires=expires)
            case KeyRevoked():
                self._keys[change.id] = replace(self._keys[change.id], revoked=True)
            case AdapterChange(tenant=tenant, name=name):
                adapters = self._adapters(tenant)
                if isinstance(change, VersionRegistered):
                    adapters.setdefault(name, AdapterRecord(tenant, name))
                adapters[name] = _apply_to_adapter(adapters[name], change, entry)
            case CatalogCreated() | Pinned() | Unpinned():
                raise AssertionError(f"{change.type} changes no tenant's partition")
            case _:
                assert_never(change)

    def _apply_to_all_tenants(self, change: Change, entry: Entry) -> None:
        match change:
            case KeyCreated():
                if Scope.ADMIN in change.scopes:
                    self._admin_keys.add(change.id)
            case KeyOptionsSet():
                if change.options.get("expires") is not None:
                    self._admin_keys.discard(change.id)
            case KeyReplaced() | KeyRevoked():
                self._admin_keys.discard(change.id)
            case AdapterShared(shared=True):
                self._shared.add((change.tenant, change.name))
            case AdapterShared():
                self._shared.discard((change.tenant, change.name))
            case AdapterRetired():
                self._shared.discard((change.tenant, change.name))
                self._pins.pop(PinKey(change.tenant, change.name), None)
            case Pinned():
                self._pin(change, entry)
            case Unpinned():
                self._pins.pop(PinKey(change.tenant, change.name), None)
            case _:
                raise AssertionError(f"{change.type} concerns one tenant")

    def _adapters(self, tenant: str) -> dict[str, AdapterRecord]:
        own = self._own.get(tenant)
        if own is None:
            tenant_state = self._tenant_state(tenant)
            own = self._own[tenant] = dict(tenant_state.adapters)
            self._tenants[tenant] = replace(tenant_state, adapters=own)
        return own

    def _tenant_state(self, tenant: str) -> TenantState:
        held = self._tenants[tenant]
        if isinstance(held, TenantState):
            return held
        read = self._partition.tenant_state(tenant)
        assert read is not None
        return read

    def _create_key(self, change: KeyCreated, time: float) -> None:
        if partition_of(change.id) == self._number:
            scopes = frozenset(change.scopes)
            key = KeyRecord(change.id, change.tenant, scopes, change.sha256, time)
            self._keys[change.id] = key
        if partition_of(change.sha256) == self._number:
            self._key_ids[change.sha256] = change.id
        if change.tenant is not None and partition_of(change.tenant) == self._number:
            tenant_state = self._tenant_state(change.tenant)
            self._tenants[change.tenant] = replace(
                tenant_state, key_ids=(*tenant_state.key_ids, change.id)
            )

    def _pin(self, change: Pinned, entry: Entry) -> None:
        key = PinKey(change.tenant, change.name)
        before = self._pins.get(key)
        kept_on = before is not None and not before.expired(entry.time)
        self._pins[key] = PinRecord(
            tenant=change.tenant,
            name=change.name,
            selector=change.selector,
            tier=change.tier,
            replicas=change.replicas,
            priority=change.priority,
            reason=change.reason,
            expires=change.expires,
            created=before.created if before is not None and kept_on else entry.time,
            actor=entry.actor,
            prompt=change.prompt,
            draft=bool(change.draft),
        )


def _apply_to_adapter(
    record: AdapterRecord, change: AnyAdapterChange, entry: Entry
) -> AdapterRecord:
    """Return the adapter's record after `change`, one of the changes of the log entry `entry`."""
    match change:
        case VersionRegistered():
            version = _version(change, entry.time)
            return replace(record, versions=(*record.versions, version))
        case DefaultsSet(version=number, defaults=defaults):
            return _changed(record, number, defaults=defaults)
        case AdapterShared(shared=shared):
            return replace(record, shared=shared)
        case AliasMoved(alias=alias, version=number):  # the previous version joins the history
            history = record.alias_history.get(alias, ())
            if alias in record.aliases:
                history = (*history, record.aliases[alias])
            return _pointed(record, alias, number, history)
        case AliasRolledBack(alias=alias, version=number):
            # the history ends before the version's last occurrence in it
            history = record.alias_history[alias]
            at = len(history) - 1 - history[::-1].index(number)
            return _pointed(record, alias, number, history[:at])
        case ShareGiven(alias=alias, version=number, fraction=fraction):
            return replace(record, shares={**record.shares, alias: AliasShare(number, fraction)})
        case ShareEnded(alias=alias):
            return replace(record, shares=_without(record.shares, alias))
        case VersionRetired(version=number):
            return _changed(record, number, retired=True)
        case VersionRestored(version=number):
            return _changed(record, number, retired=False)
        case AdapterRetired():
            versions = tuple(replace(version, retired=True) for version in record.versions)
            return AdapterRecord(
                record.tenant, record.name, versions=versions, retired_at=entry.seq
            )
        case _:
            assert_never(change)


def _version(change: VersionRegistered, time: float) -> VersionRecord:
    return VersionRecord(
        version=change.version,
        digest=change.digest,
        size_bytes=change.size_bytes,
        max_rank=change.max_rank,
        base_model=change.base_model,
        created=time,
        gpu_bytes=change.gpu_bytes,
        touches=change.touches,
        trained_on=change.trained_on,
        invocation_tokens=change.invocation_tokens,
        parity=change.parity,
        head=change.head,
        embedder=change.embedder,
        vocabulary=change.vocabulary,
    )


def _pointed(
    record: AdapterRecord, alias: str, version: int, history: tuple[int, ...]
) -> AdapterRecord:
    return replace(
        record,
        aliases={**record.aliases, alias: version},
        alias_history={**record.alias_history, alias: history},
        shares=_without(record.shares, alias),
    )


def _changed(record: AdapterRecord, number: int, **fields: Any) -> AdapterRecord:
    versions = (replace(v, **fields) if v.version == number else v for v in record.versions)
    return replace(record, versions=tuple(versions))


def _without(table: Mapping[str, V], name: str) -> Mapping[str, V]:
    return {at: value for at, value in table.items() if at != name}
