"""Which replicas keep each pinned adapter, and which pins cannot be met: a pure function.

Pins are served by priority, older ones first among equals, so a new pin takes no place from its
equals. Where a pin goes depends on the replicas' names and on the room for pins, not on what is
loaded: whoever computes a plan, and whenever, gets the same one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from lorikeet.catalog.records import PinKey, PinRecord
from lorikeet.catalog.rules.pin_budget import PinnedVersion
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.placement_decision import PinTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.rendezvous import preferred
from lorikeet_engine.adapter import AdapterRef

PinTargets = Mapping[str, Mapping[str, PinTarget]]
"""replica → digest → pin target. By digest: two names may share one adapter's weights."""


class Cause(Enum):
    """Why a pin is not met."""

    NO_VERSION = "no_version"
    BUDGET = "budget"
    NO_REPLICA = "no_replica"
    TOO_FEW_REPLICAS = "too_few_replicas"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A pin that is not fully met, and why: for one of its versions, or for all (ref None)."""

    pin: PinRecord
    ref: AdapterRef | None
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What replicas must keep, and the pins that cannot be met."""

    targets: PinTargets
    shortfalls: tuple[Shortfall, ...]


def place_pins(pins: ResolvedPins, reports: Iterable[ReplicaReport]) -> PlacementPlan:
    """Give each pin its replicas, the ones its requests are routed to first.

    Every replica has an entry, if only an empty one. Where two pins name one adapter's weights on
    one replica the nearer tier holds, and its bytes count once. No replica is promised more at any
    tier than it says that pins can take there.
    """
    draft = _Draft(pins.budgets, sorted(reports, key=lambda report: report.replica))
    shortfalls = [
        shortfall
        for resolved in sorted(pins.all, key=_precedence)
        for shortfall in draft.place(resolved)
    ]
    return PlacementPlan(draft.targets, tuple(shortfalls))


def image_sizes(reports: Iterable[ReplicaReport]) -> dict[str, int]:
    """The bytes of adapters that are on a GPU now, by digest."""
    adapters = (adapter for report in reports for adapter in report.adapters)
    return {each.digest: each.gpu_bytes for each in adapters if each.pieces}


def _precedence(resolved: ResolvedPin) -> tuple[int, float, PinKey]:
    return -resolved.pin.priority, resolved.pin.created, resolved.pin.key


class _Draft:
    """A plan in the making: what was given, and what is left of replicas and budgets."""

    def __init__(self, budgets: Mapping[str, int], reports: Sequence[ReplicaReport]) -> None:
        self.targets: dict[str, dict[str, PinTarget]] = {report.replica: {} for report in reports}
        self._left = {
            report.replica: {tier: report.pinnable_bytes(tier) for tier in report.status.tiers}
            for report in reports
        }
        self._sizes = image_sizes(reports)  # a catalog may be older than the engines' dtype
        self._serving: dict[str, list[str]] = {}
        for report in reports:
            self._serving.setdefault(report.base_model, []).append(report.replica)
        self._budgets = budgets
        self._budgets_left = dict(budgets)
        self._charged: set[tuple[str, str]] = set()  # tenant and digest

    def place(self, resolved: ResolvedPin) -> Iterator[Shortfall]:
        """Place what fits, and yield what does not."""
        if not resolved.versions and resolved.pin.name is not None:
            none = "it names no version that can be used"
            yield Shortfall(resolved.pin, None, Cause.NO_VERSION, none)
        for version in resolved.versions:
            shortfall = self._charge(version, resolved.pin) or self._place_version(
                version, resolved.pin
            )
            if shortfall:
                yield shortfall

    def _charge(self, version: PinnedVersion, pin: PinRecord) -> Shortfall | None:
        """Charge the version's tenant; the shortfall if that is beyond the budget."""
        tenant, image = version.ref.tenant, (version.ref.tenant, version.ref.digest)
        if tenant not in self._budgets or image in self._charged:
            return None
        left = self._budgets_left[tenant]
        if version.image_bytes > left:
            return Shortfall(
                pin,
                version.ref,
                Cause.BUDGET,
                f"it takes {version.image_bytes} bytes, and pins before it leave {left} of the "
                f"tenant's budget of {self._budgets[tenant]}",
            )
        self._budgets_left[tenant] -= version.image_bytes
        self._charged.add(image)
        return None

    def _place_version(self, version: PinnedVersion, pin: PinRecord) -> Shortfall | None:
        """Keep the version on as many replicas as its pin wants; the shortfall if on fewer."""
        serving = self._serving.get(version.base_model, [])
        wanted = len(serving) if pin.replicas is None else pin.replicas
        if not serving:
            why = f"no replica of {version.base_model} reports"
            return Shortfall(pin, version.ref, Cause.NO_REPLICA, why)
        digest = version.ref.digest
        order = serving if wanted >= len(serving) else preferred(digest, tuple(serving))
        size = self._sizes.get(digest, version.image_bytes)
        kept = 0
        for replica in order:
            kept += self._reserve(replica, PinTarget(version.ref, pin.tier), size)
            if kept == wanted:
                return None
        if kept == len(serving):
            why = f"{wanted} replicas are wanted, and {kept} serve {version.base_model}"
            return Shortfall(pin, version.ref, Cause.TOO_FEW_REPLICAS, why)
        left = max(self._left[replica].get(pin.tier, 0) for replica in serving)
        return Shortfall(
            pin,
            version.ref,
            Cause.NO_ROOM,
            f"it takes {size} bytes, and pins before it leave {left} on {pin.tier} at most: kept on"
            f" {kept} of {wanted} replicas",
        )

    def _reserve(self, replica: str, target: PinTarget, size: int) -> bool:
        digest, left = target.ref.digest, self._left[replica]
        held = self.targets[replica].get(digest)
        if held is not None and held.tier >= target.tier:
            return True
        if left.get(target.tier, 0) < size:
            return False
        left[target.tier] -= size
        if held is not None:
            left[held.tier] += size
        self.targets[replica][digest] = target
        return True
