"""Status of pins: met, loading or unmet."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from lorikeet.catalog.records import PinKey, PinRecord
from lorikeet.catalog.rules.pin_budget import PinnedVersion, charged_bytes
from lorikeet.placement.pin_placement import (
    PinTargets,
    PlacementPlan,
    Shortfall,
    pinned_prompt,
    place_pins,
)
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency


class PinState(Enum):
    """State of a pin.

    MET: every version is at the pin's tier on enough replicas.
    LOADING: every version has a place in the plan, and some are not loaded yet.
    UNMET: the plan keeps a version on fewer replicas than wanted, or the pin selects no version.
    """

    MET = "met"
    LOADING = "loading"
    UNMET = "unmet"


@dataclass(frozen=True, slots=True)
class PromptStatus:
    """Progress of a pin's system prompt.

    computed: number of replicas that have computed it with every version of the pin.
    wanted: number of replicas that keep a version of the pin, and so compute it.
    failure: reason why a replica could not compute it; None if none failed.
    """

    computed: int
    wanted: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class PinStatus:
    """Status of one pin.

    versions: number of versions that the pin selects.
    image_bytes: bytes of these versions on one replica.
    prompt: progress of the pin's system prompt; None without one.
    """

    pin: PinRecord
    state: PinState
    versions: int
    image_bytes: int
    shortfalls: tuple[Shortfall, ...]
    prompt: PromptStatus | None


class AdapterTiers:
    """Tiers of adapters on each replica, from the replicas' reports."""

    def __init__(self, reports: Sequence[ReplicaReport]) -> None:
        self._replicas: dict[str, int] = defaultdict(int)  # number of replicas by base model
        self._held: dict[str, dict[str, Residency]] = defaultdict(dict)  # digest → replica → tier
        for report in reports:
            self._replicas[report.base_model] += 1
            for adapter in report.adapters:
                self._held[adapter.digest][report.replica] = adapter.residency

    def tier(self, digest: str, replica: str) -> Residency:
        """Return the replica's tier that has the adapter and is nearest to its GPU, else REMOTE."""
        return self._held.get(digest, {}).get(replica, Residency.REMOTE)

    def meets(self, version: PinnedVersion, pin: PinRecord) -> bool:
        """Whether as many replicas as the pin wants have the version at the pin's tier or nearer to
        the GPU.
        """
        wanted = self._replicas[version.base_model] if pin.replicas is None else pin.replicas
        held = self._held.get(version.ref.digest, {}).values()
        return sum(tier >= pin.tier for tier in held) >= wanted


def pin_statuses(
    pins: ResolvedPins, reports: Sequence[ReplicaReport], placement: PlacementPlan | None = None
) -> Iterator[PinStatus]:
    """Yield the status of each pin, in the order of `pins.all`.

    placement: placement plan of these pins and reports; None: compute the plan.
    """
    tiers = AdapterTiers(reports)
    short: dict[PinKey, list[Shortfall]] = defaultdict(list)
    placement = placement or place_pins(pins, reports)
    for shortfall in placement.shortfalls:
        short[shortfall.pin.key].append(shortfall)
    for resolved in pins.all:
        shortfalls = tuple(short[resolved.pin.key])
        yield PinStatus(
            resolved.pin,
            PinState.UNMET if shortfalls else _state(resolved, tiers),
            len(resolved.versions),
            charged_bytes(resolved.versions),
            shortfalls,
            _prompt_status(resolved, placement.targets, reports),
        )


def _prompt_status(
    resolved: ResolvedPin, targets: PinTargets, reports: Sequence[ReplicaReport]
) -> PromptStatus | None:
    if resolved.pin.prompt is None:
        return None
    prompts = [each for version in resolved.versions if (each := pinned_prompt(version))]
    computed, wanted, failure = 0, 0, None
    for report in reports:
        held = targets.get(report.replica, {})
        own = [
            prompt.name
            for prompt in prompts
            if (target := held.get(prompt.ref.digest)) and prompt in target.prompts
        ]
        wanted += bool(own)
        computed += bool(own) and all(report.prompts.get(name, "") is None for name in own)
        failure = next(filter(None, map(report.prompts.get, own)), failure)
    return PromptStatus(computed, wanted, failure)


def _state(resolved: ResolvedPin, tiers: AdapterTiers) -> PinState:
    met = all(tiers.meets(version, resolved.pin) for version in resolved.versions)
    return PinState.MET if met else PinState.LOADING
