"""How log entries turn one state into the next: a pure function."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import assert_never

from lorikeet.catalog.log.adapter_fold import fold_adapter
from lorikeet.catalog.log.changes import (
    AdapterChange,
    AdapterRetired,
    AdapterShared,
    CatalogCreated,
    Change,
    Entry,
    KeyCreated,
    KeyReplaced,
    KeyRevoked,
    KeyTermsSet,
    Pinned,
    TenantSaved,
    TenantTermsSet,
    Unpinned,
    VersionRegistered,
)
from lorikeet.catalog.records import (
    AdapterRecord,
    Holdings,
    KeyRecord,
    PinKey,
    PinRecord,
    Scope,
    TenantRecord,
)
from lorikeet.catalog.rules.tenant_terms import with_terms
from lorikeet.catalog.snapshots.partitions import COMMON, Partition, Unread, part_of
from lorikeet.catalog.state import CatalogState


def fold(state: CatalogState, entries: Iterable[Entry]) -> CatalogState:
    """The state after these entries, which follow on `state.seq` without a gap.

    Costs what they touch, however large the state is: the rest is shared with `state`.
    """
    seq, time = state.seq, state.time
    touching: dict[int, list[Entry]] = {}
    for entry in entries:
        assert entry.seq == seq + 1, f"entry {entry.seq} after {seq}"
        seq, time = entry.seq, entry.time
        for number in {number for change in entry.changes for number in _parts_of(change)}:
            touching.setdefault(number, []).append(entry)
    parts = list(state.parts)
    for number, news in touching.items():
        held = parts[number]
        if isinstance(held, Unread):
            parts[number] = Unread(held.digest, (*held.pending, *news))
        else:
            parts[number] = fold_part(held, number, news)
    return CatalogState(seq, time, tuple(parts))


def fold_changes(state: CatalogState, changes: Iterable[Change], time: float) -> CatalogState:
    """The state as these changes would leave it, were they made at `time`, Unix seconds."""
    imagined = Entry(seq=state.seq + 1, nonce="", actor="", time=time, changes=tuple(changes))
    return fold(state, [imagined])


def fold_part(part: Partition, number: int, entries: Iterable[Entry]) -> Partition:
    """Partition `number` after what these entries change in it."""
    draft = _Draft(part, number)
    for entry in entries:
        for change in entry.changes:
            if number in _parts_of(change):
                draft.apply(change, entry)
    return draft.finish()


def _parts_of(change: Change) -> Collection[int]:
    """The numbers of the parts that a change changes."""
    match change:
        case CatalogCreated():
            return ()
        case TenantSaved():
            return (part_of(change.name),)
        case KeyCreated():
            whose = COMMON if change.tenant is None else part_of(change.tenant)
            return (part_of(change.id), part_of(change.sha256), whose)
        case KeyTermsSet() | KeyReplaced() | KeyRevoked():
            return (part_of(change.id), COMMON)
        case AdapterShared() | AdapterRetired():
            return (part_of(change.tenant), COMMON)
        case Pinned() | Unpinned():
            return (COMMON,)
        case _:
            return (part_of(change.tenant),)


class _Draft:
    """One part in the making: a copy of each of its tables, and of each touched tenant's."""

    def __init__(self, part: Partition, number: int) -> None:
        self._part = part
        self._number = number
        self._tenants = dict(part.tenants)
        self._own: dict[str, dict[str, AdapterRecord]] = {}  # tenants whose table is copied
        self._keys = dict(part.keys)
        self._key_ids = dict(part.key_ids)
        self._shared = set(part.shared)
        self._pins = dict(part.pins)
        self._admin_keys = set(part.admin_keys)

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
            case TenantSaved(name=name):
                self._tenants[name] = Holdings(TenantRecord(name, entry.time))
            case TenantTermsSet(tenant=tenant, terms=terms):
                before = self._holdings(tenant)
                self._tenants[tenant] = replace(before, record=with_terms(before.record, terms))
            case KeyCreated():
                self._create_key(change, entry.time)
            case KeyTermsSet():
                self._keys[change.id] = with_terms(self._keys[change.id], change.terms)
            case KeyReplaced(by=by, expires=expires):
                key = self._keys[change.id]
                self._keys[change.id] = replace(key, replaced_by=by, expires=expires)
            case KeyRevoked():
                self._keys[change.id] = replace(self._keys[change.id], revoked=True)
            case AdapterChange(tenant=tenant, name=name):
                adapters = self._adapters(tenant)
                if isinstance(change, VersionRegistered):
                    adapters.setdefault(name, AdapterRecord(tenant, name))
                adapters[name] = fold_adapter(adapters[name], change, entry)
            case CatalogCreated() | Pinned() | Unpinned():
                raise AssertionError(f"{change.type} changes no tenant's part")
            case _:
                assert_never(change)

    def _apply_to_all_tenants(self, change: Change, entry: Entry) -> None:
        match change:
            case KeyCreated():
                if Scope.ADMIN in change.scopes:
                    self._admin_keys.add(change.id)
            case KeyTermsSet():
                if change.terms.get("expires") is not None:
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
            holdings = self._holdings(tenant)
            own = self._own[tenant] = dict(holdings.adapters)
            self._tenants[tenant] = replace(holdings, adapters=own)
        return own

    def _holdings(self, tenant: str) -> Holdings:
        held = self._tenants[tenant]
        if isinstance(held, Holdings):
            return held
        read = self._part.holdings(tenant)
        assert read is not None
        return read

    def _create_key(self, change: KeyCreated, time: float) -> None:
        if part_of(change.id) == self._number:
            scopes = frozenset(change.scopes)
            key = KeyRecord(change.id, change.tenant, scopes, change.sha256, time)
            self._keys[change.id] = key
        if part_of(change.sha256) == self._number:
            self._key_ids[change.sha256] = change.id
        if change.tenant is not None and part_of(change.tenant) == self._number:
            holdings = self._holdings(change.tenant)
            self._tenants[change.tenant] = replace(holdings, key_ids=(*holdings.key_ids, change.id))

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
        )
