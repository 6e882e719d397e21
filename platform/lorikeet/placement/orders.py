"""What the controller tells a replica."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.placement.plan import Keep
from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class Bring:
    """An adapter to bring to this tier if that costs nobody; nobody asks whether it came.

    uses: how many of the fleet's it should draw there.
    """

    ref: AdapterRef
    tier: Residency
    uses: float


@dataclass(frozen=True, slots=True)
class Orders:
    """For one replica.

    keeps: all that it must keep, by digest; what is not named it need keep no more. alone: share of
    the adapters in use that only this replica has on GPU or host; None while nobody counts. brings:
    most wanted first.
    """

    keeps: Mapping[str, Keep] = field(default_factory=dict)
    alone: float | None = None
    brings: tuple[Bring, ...] = ()
