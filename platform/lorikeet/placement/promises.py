"""What is promised now: the catalog's pins, resolved to versions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.pinned import PinnedVersion, versions_kept
from lorikeet.catalog.records import PinRecord
from lorikeet.catalog.state import CatalogState


@dataclass(frozen=True, slots=True)
class Promise:
    """A pin and the versions that it names now, in the order in which they are kept."""

    pin: PinRecord
    versions: tuple[PinnedVersion, ...]


@dataclass(frozen=True, slots=True)
class Promises:
    """All pins in force, and the tenants' budgets in bytes of images on one replica.

    until: when the next pin ends, Unix seconds; till then the same state promises the same.
    """

    all: tuple[Promise, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)
    until: float = math.inf


def promises_of(state: CatalogState, now: float) -> Promises:
    """What the pins of this state promise at `now`, Unix seconds."""
    pins = state.pins(now)
    tenants = {pin.tenant for pin in pins}
    state.expect(tenants)
    budgets = {name: state.tenant(name).pin_budget_bytes for name in tenants}
    return Promises(
        tuple(Promise(pin, versions_kept(state, pin)) for pin in pins),
        {name: budget for name, budget in budgets.items() if budget is not None},
        min((pin.expires for pin in pins if pin.expires is not None), default=math.inf),
    )
