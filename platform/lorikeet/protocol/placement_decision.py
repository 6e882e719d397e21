"""Placement decision of the controller for a replica."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class PinTarget:
    """Adapter that a replica must hold at a tier or nearer."""

    ref: AdapterRef
    tier: Residency


@dataclass(frozen=True, slots=True)
class PrefetchTarget:
    """Adapter to load to a tier if no request suffers; its success is not reported.

    uses: requests of the fleet that the copy is expected to serve.
    """

    ref: AdapterRef
    tier: Residency
    uses: float


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Adapters that one replica should hold.

    pins: all pins by digest; a pin that is missing here is removed.
    sole_copies: share of the adapters in use that only this replica has on GPU or host; None while
        unknown.
    prefetches: most wanted first.
    """

    pins: Mapping[str, PinTarget] = field(default_factory=dict)
    sole_copies: float | None = None
    prefetches: tuple[PrefetchTarget, ...] = ()
