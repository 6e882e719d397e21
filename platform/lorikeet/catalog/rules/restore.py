"""Undoing a retirement: what changes bring back what was there. Pure functions."""

from collections.abc import Iterator

from lorikeet.catalog.changes import (
    AdapterShared,
    AliasMoved,
    Change,
    Pinned,
    ShareGiven,
    VersionRestored,
)
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import AdapterRecord, PinRecord
from lorikeet.catalog.rules.adapters import Changes, known_version
from lorikeet.catalog.rules.quota import check_quota
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict


def restore_version(state: CatalogState, tenant: str, name: str, number: int) -> Changes:
    """Make one version usable again; if it is the only one it becomes prod.

    Raises UnknownModel, and Conflict beyond the tenant's limits.
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
    """The entry that retired it as a whole, which alone can be restored so. Raises Conflict."""
    if not record.retired or record.retired_at is None:
        raise Conflict(
            f"{record.label} is not retired: to restore one version, name it "
            f"(`lorikeet restore {record.label}@1`)"
        )
    return record.retired_at


def restore_adapter(
    state: CatalogState, before: AdapterRecord, pin: PinRecord | None, now: float
) -> Changes:
    """Bring an adapter back as it was `before` it was retired, with its pin if that lasts still.

    Raises Conflict when it is not retired, and beyond the tenant's limits.
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
        yield Pinned(
            tenant=tenant,
            name=name,
            selector=pin.selector,
            tier=pin.tier,
            replicas=pin.replicas,
            priority=pin.priority,
            reason=pin.reason,
            expires=pin.expires,
        )
