"""What each replica must keep: a pure function of pins and of what replicas report.

Pins are served by priority, older ones first among equals, so a new pin takes no place from its
equals. Where a pin goes depends on the replicas' names and on the room for pins, not on what is
loaded: whoever computes a plan, and whenever, gets the same one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lorikeet.catalog.pinned import PinnedVersion
from lorikeet.catalog.records import PinRecord
from lorikeet.placement.preference import preferred
from lorikeet.placement.promises import Promise, Promises
from lorikeet.placement.report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class Keep:
    """An adapter that a replica must hold at this tier or nearer."""

    ref: AdapterRef
    tier: Residency


Plan = Mapping[str, Mapping[str, Keep]]
"""replica → digest → what to keep. By digest: two names may share one adapter's weights."""


class Cause(Enum):
    """Why a pin does not hold, in short."""

    NO_VERSION = "no_version"
    BUDGET = "budget"
    NO_REPLICA = "no_replica"
    TOO_FEW_REPLICAS = "too_few_replicas"
    NO_ROOM = "no_room"


class Why(NamedTuple):
    """The same in a sentence, with its numbers."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A pin that does not fully hold, and why: of one of its versions, or of all (ref None)."""

    pin: PinRecord
    ref: AdapterRef | None
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The plan, and what it cannot keep."""

    plan: Plan
    shortfalls: tuple[Shortfall, ...]


def place_pins(promises: Promises, reports: Iterable[ReplicaReport]) -> Placement:
    """Give each pin its replicas, the ones its requests are routed to first.

    Every replica has its part, if only an empty one. Where two pins name one adapter's weights on
    one replica the nearer tier holds, and its bytes count once. No replica is promised more at any
    tier than it says that pins can take there.
    """
    draft = _Draft(promises.budgets, sorted(reports, key=lambda report: report.replica))
    shortfalls = [
        shortfall
        for promise in sorted(promises.all, key=_precedence)
        for shortfall in draft.keep(promise)
    ]
    return Placement(draft.plan, tuple(shortfalls))


def image_sizes(reports: Iterable[ReplicaReport]) -> dict[str, int]:
    """What adapters take where they are on a GPU now, bytes by digest."""
    adapters = (adapter for report in reports for adapter in report.adapters)
    return {each.digest: each.gpu_bytes for each in adapters if each.pieces}


def _precedence(promise: Promise) -> tuple[int, float, tuple[str, str]]:
    return -promise.pin.priority, promise.pin.created, promise.pin.key


class _Draft:
    """A plan in the making: what was given, and what is left of replicas and budgets."""

    def __init__(self, budgets: Mapping[str, int], reports: Sequence[ReplicaReport]) -> None:
        self.plan: dict[str, dict[str, Keep]] = {report.replica: {} for report in reports}
        self._left = {
            report.replica: {
                tier: each.pinnable_bytes for tier, each in report.status.tiers.items()
            }
            for report in reports
        }
        self._sizes = image_sizes(reports)  # a catalog may be older than the engines' dtype
        self._serving: dict[str, list[str]] = {}
        for report in reports:
            self._serving.setdefault(report.base_model, []).append(report.replica)
        self._budgets = budgets
        self._budgets_left = dict(budgets)
        self._charged: set[tuple[str, str]] = set()  # tenant and digest

    def keep(self, promise: Promise) -> Iterator[Shortfall]:
        """Keep what fits, and say what does not."""
        if not promise.versions and promise.pin.name is not None:
            none = "it names no version that can be used"
            yield Shortfall(promise.pin, None, Cause.NO_VERSION, none)
        for version in promise.versions:
            why = self._charge(version) or self._place(version, promise.pin)
            if why:
                yield Shortfall(promise.pin, version.ref, *why)

    def _charge(self, version: PinnedVersion) -> Why | None:
        """Charge its tenant; why not, if that is beyond the budget."""
        tenant, image = version.ref.tenant, (version.ref.tenant, version.ref.digest)
        if tenant not in self._budgets or image in self._charged:
            return None
        left = self._budgets_left[tenant]
        if version.image_bytes > left:
            return Why(
                Cause.BUDGET,
                f"it takes {version.image_bytes} bytes, and pins before it leave {left} of the "
                f"tenant's budget of {self._budgets[tenant]}",
            )
        self._budgets_left[tenant] -= version.image_bytes
        self._charged.add(image)
        return None

    def _place(self, version: PinnedVersion, pin: PinRecord) -> Why | None:
        """Keep it on as many replicas as promised; why it is on fewer, if it is."""
        serving = self._serving.get(version.base_model, [])
        wanted = len(serving) if pin.replicas is None else pin.replicas
        if not serving:
            return Why(Cause.NO_REPLICA, f"no replica of {version.base_model} reports")
        digest = version.ref.digest
        order = serving if wanted >= len(serving) else preferred(digest, tuple(serving))
        size = self._sizes.get(digest, version.image_bytes)
        kept = 0
        for replica in order:
            kept += self._keep(replica, Keep(version.ref, pin.tier), size)
            if kept == wanted:
                return None
        if kept == len(serving):
            return Why(
                Cause.TOO_FEW_REPLICAS,
                f"{wanted} replicas are wanted, and {kept} serve {version.base_model}",
            )
        left = max(self._left[replica].get(pin.tier, 0) for replica in serving)
        return Why(
            Cause.NO_ROOM,
            f"it takes {size} bytes, and pins before it leave {left} on {pin.tier} at most: kept on"
            f" {kept} of {wanted} replicas",
        )

    def _keep(self, replica: str, keep: Keep, size: int) -> bool:
        digest, left = keep.ref.digest, self._left[replica]
        held = self.plan[replica].get(digest)
        if held is not None and held.tier >= keep.tier:
            return True
        if left.get(keep.tier, 0) < size:
            return False
        left[keep.tier] -= size
        if held is not None:
            left[held.tier] += size
        self.plan[replica][digest] = keep
        return True
