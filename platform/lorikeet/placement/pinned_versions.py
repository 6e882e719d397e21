"""Resolution of the catalog's pins in force to versions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.records import PinKey, PinRecord, TenantState
from lorikeet.catalog.rules.pin_budget import PinnedVersion, versions_kept
from lorikeet.catalog.state import CatalogState


@dataclass(frozen=True, slots=True)
class ResolvedPin:
    """A pin, an order to keep an adapter at a tier, and the versions that it selects now, in the
    order in which they are placed.
    """

    pin: PinRecord
    versions: tuple[PinnedVersion, ...]


@dataclass(frozen=True, slots=True)
class ResolvedPins:
    """All pins in force: orders to keep versions of adapters at a memory tier.

    budgets: limit on the bytes of pinned adapters on one replica, by tenant; a tenant without a
        limit is absent.
    until: time at which the next pin expires, Unix seconds. Until then, the same catalog state has
        the same pins in force.
    """

    all: tuple[ResolvedPin, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class _Cached:
    """A resolved pin, with the tenant's state that it was resolved from.

    held: the tenant's state, for comparison with later ones.
    budget: the tenant's limit on pinned bytes; None: no limit.
    """

    held: TenantState | bytes
    resolved: ResolvedPin
    budget: int | None


class PinResolver:
    """Resolver that selects the versions of each pin. Thread-safe.

    A pin is resolved again only if the pin or its tenant has changed since the last call.
    """

    def __init__(self) -> None:
        self._cached: Mapping[PinKey, _Cached] = {}  # replaced as a whole, never mutated

    def resolve(self, state: CatalogState, now: float) -> ResolvedPins:
        """Return a state's pins in force at `now` (Unix seconds), with their versions."""
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
