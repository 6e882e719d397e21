"""The catalog's pins that are in force, resolved to versions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.records import PinKey, PinRecord, TenantState
from lorikeet.catalog.rules.pin_budget import PinnedVersion, versions_kept
from lorikeet.catalog.state import CatalogState


@dataclass(frozen=True, slots=True)
class ResolvedPin:
    """A pin and the versions that it names now, in the order in which they are kept."""

    pin: PinRecord
    versions: tuple[PinnedVersion, ...]


@dataclass(frozen=True, slots=True)
class ResolvedPins:
    """All pins in force, and the tenants' budgets in bytes of images on one replica.

    until: when the next pin ends, Unix seconds; till then the same state resolves to the same.
    """

    all: tuple[ResolvedPin, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class _Cached:
    """A resolved pin, and the tenant's holdings from which it was resolved."""

    held: TenantState | bytes
    resolved: ResolvedPin
    budget: int | None


class PinResolver:
    """Resolves the pins of a catalog that moves on; only tenants that changed cost anything.

    For any number of threads.
    """

    def __init__(self) -> None:
        self._cached: Mapping[PinKey, _Cached] = {}  # by the pin's key; never changed

    def resolve(self, state: CatalogState, now: float) -> ResolvedPins:
        """The pins of this state and their versions at `now`, Unix seconds."""
        pins = state.pins(now)
        state.require({pin.tenant for pin in pins})
        cached = {pin.key: self._resolve_one(state, pin) for pin in pins}
        self._cached = cached
        return ResolvedPins(
            tuple(each.resolved for each in cached.values()),
            {pin.tenant: b for pin in pins if (b := cached[pin.key].budget) is not None},
            min((pin.expires for pin in pins if pin.expires is not None), default=math.inf),
        )

    def _resolve_one(self, state: CatalogState, pin: PinRecord) -> _Cached:
        held = state.tenant_as_held(pin.tenant)
        before = self._cached.get(pin.key)
        if before is not None and before.held is held and before.resolved.pin == pin:
            return before
        budget = state.tenant(pin.tenant).pin_budget_bytes
        return _Cached(held, ResolvedPin(pin, versions_kept(state, pin)), budget)
