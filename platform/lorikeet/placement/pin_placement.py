"""Placement of pinned adapters on replicas: a pure function, which also finds unmet pins.

Pins are placed by priority, older ones first among equals, so a new pin displaces none of equal
priority. The plan depends on the replicas' names and bytes for pins alone: every process computes
the same plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lorikeet.catalog.records import PinKey, PinRecord
from lorikeet.catalog.rules.pin_budget import PinnedVersion
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.placement_decision import PinnedPrompt, PinTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.rendezvous import preferred
from lorikeet_engine.adapter import AdapterRef

PinTargets = Mapping[str, Mapping[str, PinTarget]]
"""Pin target by replica and digest. Adapters with equal weights have one digest."""


class Cause(Enum):
    """Reason why a pin, or a version that it selects, is not kept on as many replicas as wanted."""

    NO_VERSION = "no_version"
    BUDGET = "budget"
    NO_REPLICA = "no_replica"
    TOO_FEW_REPLICAS = "too_few_replicas"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A pin (order to keep an adapter at a tier) that the plan does not fully meet.

    ref: version that is on fewer replicas than wanted; None: the pin selects no version at all.
    reason: explanation for the operator.
    """

    pin: PinRecord
    ref: AdapterRef | None
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Placement plan: the adapters that replicas must keep, and the pins that cannot be met.

    targets: adapters to keep and their tiers, by replica and digest.
    """

    targets: PinTargets
    shortfalls: tuple[Shortfall, ...]


def place_pins(pins: ResolvedPins, reports: Iterable[ReplicaReport]) -> PlacementPlan:
    """Assign to each pin, an order to keep an adapter at a tier, the replicas to which routing
    sends the adapter's requests first.

    Every replica has an entry in the plan, perhaps an empty one. If two pins select the same
    weights on one replica, the tier nearer to the GPU is used and the bytes count once. The targets
    of a replica and tier never exceed the bytes that the replica reports as pinnable there.
    """
    draft = _Draft(pins.budgets, sorted(reports, key=lambda report: report.replica))
    shortfalls = [
        shortfall
        for resolved in sorted(pins.all, key=_precedence)
        for shortfall in draft.place(resolved)
    ]
    return PlacementPlan(draft.targets, tuple(shortfalls))


def image_sizes(reports: Iterable[ReplicaReport]) -> dict[str, int]:
    """Return the bytes that each adapter now on a GPU takes there, by digest."""
    adapters = (adapter for report in reports for adapter in report.adapters)
    return {each.digest: each.gpu_bytes for each in adapters if each.pieces}


def pinned_prompt(version: PinnedVersion) -> PinnedPrompt | None:
    """Return the system prompt that replicas compute with a pinned version; None without one."""
    return None if version.prompt is None else PinnedPrompt(version.ref, version.prompt)


def _precedence(resolved: ResolvedPin) -> tuple[int, float, PinKey]:
    return -resolved.pin.priority, resolved.pin.created, resolved.pin.key


class _Draft:
    """Placement plan under construction.

    Holds the pin targets so far, the bytes left in each tier of each replica, and the bytes left in
    each tenant's budget.
    """

    def __init__(self, budgets: Mapping[str, int], reports: Sequence[ReplicaReport]) -> None:
        self.targets: dict[str, dict[str, PinTarget]] = {report.replica: {} for report in reports}
        self._left = {
            report.replica: {tier: report.pinnable_bytes(tier) for tier in report.status.tiers}
            for report in reports
        }
        self._sizes = image_sizes(reports)  # a catalog's sizes may predate the engines' dtype
        self._serving: dict[str, list[str]] = {}
        for report in reports:
            self._serving.setdefault(report.base_model, []).append(report.replica)
        self._budgets = budgets
        self._budgets_left = dict(budgets)
        self._charged: set[tuple[str, str]] = set()  # tenant and digest

    def place(self, resolved: ResolvedPin) -> Iterator[Shortfall]:
        """Place the versions of a pin; yield a Shortfall for each version that too few replicas
        keep.
        """
        if not resolved.versions and resolved.pin.name is not None:
            none = "it selects no usable version"
            yield Shortfall(resolved.pin, None, Cause.NO_VERSION, none)
        for version in resolved.versions:
            shortfall = self._charge(version, resolved.pin) or self._place_version(
                version, resolved.pin
            )
            if shortfall:
                yield shortfall

    def _charge(self, version: PinnedVersion, pin: PinRecord) -> Shortfall | None:
        """Count a version's bytes in its tenant's limit on pinned bytes, once for each digest.
        Return a Shortfall, and count nothing, if they do not fit.
        """
        tenant, image = version.ref.tenant, (version.ref.tenant, version.ref.digest)
        if tenant not in self._budgets or image in self._charged:
            return None
        left = self._budgets_left[tenant]
        if version.image_bytes > left:
            return Shortfall(
                pin,
                version.ref,
                Cause.BUDGET,
                f"it takes {version.image_bytes} bytes, and earlier pins leave {left} of the "
                f"tenant's budget of {self._budgets[tenant]}",
            )
        self._budgets_left[tenant] -= version.image_bytes
        self._charged.add(image)
        return None

    def _place_version(self, version: PinnedVersion, pin: PinRecord) -> Shortfall | None:
        """Place the version on as many replicas as its pin wants, or return a Shortfall."""
        serving = self._serving.get(version.base_model, [])
        wanted = len(serving) if pin.replicas is None else pin.replicas
        if not serving:
            why = f"no replica of {version.base_model} reports"
            return Shortfall(pin, version.ref, Cause.NO_REPLICA, why)
        digest = version.ref.digest
        order = serving if wanted >= len(serving) else preferred(digest, tuple(serving))
        size = self._sizes.get(digest, version.image_bytes)
        prompt, kept = pinned_prompt(version), 0
        prompts = () if prompt is None else (prompt,)
        for replica in order:
            target = PinTarget(version.ref, pin.tier, prompts, pin.draft)
            kept += self._reserve(replica, target, size)
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
            f"it takes {size} bytes, and earlier pins leave at most {left} on {pin.tier}: kept on "
            f"{kept} of {wanted} replicas",
        )

    def _reserve(self, replica: str, target: PinTarget, size: int) -> bool:
        digest, left = target.ref.digest, self._left[replica]
        held = self.targets[replica].get(digest)
        if held is not None:
            prompts, draft = held.prompts + target.prompts, held.draft or target.draft
            target = replace(target, prompts=prompts, draft=draft)
        if held is not None and held.tier >= target.tier:
            self.targets[replica][digest] = replace(target, ref=held.ref, tier=held.tier)
            return True
        if left.get(target.tier, 0) < size:
            return False
        left[target.tier] -= size
        if held is not None:
            left[held.tier] += size
        self.targets[replica][digest] = target
        return True
