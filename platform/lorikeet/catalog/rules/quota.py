"""Quota of a tenant: number of its usable adapters, and their bytes in the store."""

from collections.abc import Sequence
from dataclasses import dataclass

from lorikeet.catalog.apply import apply_changes
from lorikeet.catalog.changes import Change
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """Usage of a tenant's quota, which limits the number and bytes of its adapters.

    adapters: number of usable (not retired) adapters.
    total_bytes: bytes of the blobs (files) of their usable versions; each blob counts once.
    """

    adapters: int
    total_bytes: int


def quota_usage(state: CatalogState, tenant: str) -> QuotaUsage:
    """Return the usage of a tenant's quota."""
    usable = [record for record in state.adapters(tenant) if not record.retired]
    blobs = {
        version.digest: version.size_bytes
        for record in usable
        for version in record.versions
        if not version.retired
    }
    return QuotaUsage(len(usable), sum(blobs.values()))


def check_quota(state: CatalogState, tenant: str, changes: Sequence[Change]) -> None:
    """Raise Conflict if a tenant's adapters would exceed its max_adapters or max_total_bytes.

    changes: changes about to be committed.

    Changes that add nothing are always allowed. Raises UnknownTenant if there is no such tenant.
    """
    record = state.tenant(tenant)
    if record.max_adapters is None and record.max_total_bytes is None:
        return
    before = quota_usage(state, tenant)
    after = quota_usage(apply_changes(state, changes, state.time), tenant)
    most = record.max_adapters
    if most is not None and after.adapters > max(most, before.adapters):
        raise Conflict(
            f"adapters of {tenant} in use: {before.adapters}, and its limit is {most}: retire one "
            f"(`lorikeet retire {tenant}/NAME`), or raise the limit with "
            f"`lorikeet tenants limit {tenant} --adapters N`",
            param="tenant",
        )
    most = record.max_total_bytes
    if most is not None and after.total_bytes > max(most, before.total_bytes):
        raise Conflict(
            f"the adapters of {tenant} would take {after.total_bytes} bytes, {before.total_bytes} "
            f"without this one, and its limit is {most}: retire versions or adapters that are not "
            f"needed (`lorikeet retire {tenant}/NAME@VERSION`), or raise the limit with "
            f"`lorikeet tenants limit {tenant} --bytes BYTES`",
            param="tenant",
        )
