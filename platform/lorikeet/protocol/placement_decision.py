"""What the controller tells a replica."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class PinTarget:
    """An adapter that a replica must hold at this tier or nearer."""

    ref: AdapterRef
    tier: Residency


@dataclass(frozen=True, slots=True)
class PrefetchTarget:
    """An adapter to bring to this tier if that costs nobody; nobody asks whether it came.

    uses: how many of the fleet's it should draw there.
    """

    ref: AdapterRef
    tier: Residency
    uses: float


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """What one replica should hold.

    pins: all that it must keep, by digest; what is not named it need keep no more. sole_copies:
    share of the adapters in use that only this replica has on GPU or host; None while nobody
    counts. prefetches: most wanted first.
    """

    pins: Mapping[str, PinTarget] = field(default_factory=dict)
    sole_copies: float | None = None
    prefetches: tuple[PrefetchTarget, ...] = ()
