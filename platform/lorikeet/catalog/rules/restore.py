"""Rules of restoring: pure functions that return the changes which undo a retirement."""

from collections.abc import Iterator

from lorikeet.catalog.changes import (
    AdapterShared,
    AliasMoved,
    Change,
    ShareGiven,
    VersionRestored,
)
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import AdapterRecord, PinRecord
from lorikeet.catalog.rules.adapters import Changes, known_version
from lorikeet.catalog.rules.pins import pinned_as
from lorikeet.catalog.rules.quota import check_quota
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict


def restore_version(state: CatalogState, tenant: str, name: str, number: int) -> Changes:
    """Return the changes that undo the retirement of version `number` of an adapter.

    If no other version is usable, the alias prod points to it.

    Raises UnknownModel if there is no such version, Conflict beyond the tenant's limits.
    """
    record = state.adapter(tenant, name)
    if not known_version(record, number).retired:
        return ()
    changes: list[Change] = [VersionRestored(tenant=tenant, name=name, version=number)]
    if record.retired:
        changes.append(AliasMoved(tenant=tenant, name=name, alias=DEFAULT_ALIAS, version=number))
    check_quota(state, tenant, changes)
    return changes


def retired_at(record: AdapterRecord) -> int:
    """Return the number of the log entry that retired the whole adapter.

    Raises Conflict if the adapter is not retired as a whole.
    """
    if not record.retired or record.retired_at is None:
        raise Conflict(
            f"{record.label} is not retired: to restore one version, name it "
            f"(`lorikeet restore {record.label}@1`)"
        )
    return record.retired_at


def restore_adapter(
    state: CatalogState, before: AdapterRecord, pin: PinRecord | None, now: float
) -> Changes:
    """Return the changes that restore an adapter to its record before the retirement.

    before: record of the adapter before its retirement.
    pin: pin of the adapter at that time, restored unless it has expired.
    now: Unix seconds.

    Raises Conflict if the adapter is not retired, and beyond the tenant's limits.
    """
    retired_at(state.adapter(before.tenant, before.name))
    changes = tuple(_changes(before, pin if pin and not pin.expired(now) else None))
    check_quota(state, before.tenant, changes)
    return changes


def _changes(before: AdapterRecord, pin: PinRecord | None) -> Iterator[Change]:
    tenant, name = before.tenant, before.name
    for version in before.versions:
        if not version.retired:
            yield VersionRestored(tenant=tenant, name=name, version=version.version)
    for alias, number in before.aliases.items():
        for step in (*before.alias_history[alias], number):
            yield AliasMoved(tenant=tenant, name=name, alias=alias, version=step)
    for alias, share in before.shares.items():
        yield ShareGiven(
            tenant=tenant, name=name, alias=alias, version=share.version, fraction=share.fraction
        )
    if before.shared:
        yield AdapterShared(tenant=tenant, name=name, shared=True)
    if pin is not None:
        yield pinned_as(pin)
