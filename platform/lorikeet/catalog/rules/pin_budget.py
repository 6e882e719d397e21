"""What pins keep: the versions that they name now, and what those take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lorikeet.catalog.changes import Pinned
from lorikeet.catalog.records import PinRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict
from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A version that a pin keeps.

    image_bytes: what it takes on each GPU of a replica, for each of which the host has as much.
    """

    ref: AdapterRef
    base_model: str
    image_bytes: int


def versions_kept(state: CatalogState, pin: PinRecord | Pinned) -> tuple[PinnedVersion, ...]:
    """All that a pin names now; none if what it names is retired.

    While an alias shares its requests, both versions. Of a tenant, the oldest adapter first.
    """
    if pin.name is not None:
        record = state.find(pin.tenant, pin.name)
        records = [] if record is None else [record]
    else:
        records = sorted(state.adapters(pin.tenant), key=lambda each: each.versions[0].created)
    return tuple(
        PinnedVersion(record.ref(version), version.base_model, version.gpu_bytes)
        for record in records
        for version in record.selected(pin.selector)
    )


def charged_bytes(kept: Iterable[PinnedVersion]) -> int:
    """What a tenant is charged: every image once, however many pins and replicas keep it."""
    return sum({version.ref.digest: version.image_bytes for version in kept}.values())


def check_budget(state: CatalogState, change: Pinned, now: float) -> None:
    """Whether a tenant's pins stay within its budget with this one. now: Unix seconds.

    A change that does not add to what is pinned is always fine. Raises Conflict, UnknownTenant.
    """
    budget = state.tenant(change.tenant).pin_budget_bytes
    if budget is None:
        return
    pins = [pin for pin in state.pins(now) if pin.tenant == change.tenant]
    replaced = state.pin_of(change.tenant, change.name)
    before = _charge(state, pins)
    after = _charge(state, [*(pin for pin in pins if pin != replaced), change])
    if after > max(budget, before):
        raise Conflict(
            f"the pins of {change.tenant} would take {after} bytes on each GPU, {before} "
            f"without this one, and its budget is {budget}: unpin something, or raise it with "
            f"`lorikeet tenants limit {change.tenant} --pinned-bytes BYTES`",
            param="tenant",
        )


def _charge(state: CatalogState, pins: Sequence[PinRecord | Pinned]) -> int:
    return charged_bytes(version for pin in pins for version in versions_kept(state, pin))
