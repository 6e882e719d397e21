"""Prefetcher of one base model: plans prefetches from the reports of each survey."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lorikeet.placement.demand import Demand
from lorikeet.placement.pin_placement import PinTargets
from lorikeet.placement.prefetch_plan import Prefetch, ReplicaView, plan_prefetches, sole_copies
from lorikeet.protocol.placement_decision import PinTarget, PrefetchTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency

SURVEY_S = 3.0
"""Seconds between surveys of replicas; a report costs an engine milliseconds."""
_SETTLES_S = 30.0
"""Seconds for which a prefetch that was sent counts as done when the next ones are planned.

The load may still be under way. If the replica has refused it, the prefetch is planned again after
this time.
"""


@dataclass(frozen=True, slots=True)
class PrefetchList:
    """Prefetches that all replicas of a base model should make.

    prefetches: prefetches by replica; replicas without prefetches are absent.
    sole_copies: for each replica, the fraction of all adapters in use that the replica alone has on
        GPU or host.
    """

    prefetches: Mapping[str, tuple[PrefetchTarget, ...]]
    sole_copies: Mapping[str, float]


class Prefetcher:
    """Prefetcher of one base model: knows the demand, and repeats no prefetch within _SETTLES_S
    seconds.
    """

    def __init__(self) -> None:
        self._demand = Demand()
        # by replica and digest: the prefetch, and the time when it was sent
        self._sent: dict[tuple[str, str], tuple[Prefetch, float]] = {}

    def decide(
        self, reports: Sequence[ReplicaReport], targets: PinTargets, now_s: float, *, spares: bool
    ) -> PrefetchList:
        """Decide the prefetches from new reports.

        targets: adapters that pins keep on these replicas, and their tiers.
        now_s: seconds of the caller's clock.
        spares: give every adapter in use a second replica, so that any replica can be removed.
        """
        self._demand.observe(reports, now_s)
        adapters = self._demand.adapters
        demand = {digest: each.uses for digest, each in adapters.items()}
        sizes = {digest: each.image_bytes for digest, each in adapters.items() if each.image_bytes}
        sizes |= _sizes(reports)
        replicas = {
            each.replica: _view(each, targets.get(each.replica, {}), sizes) for each in reports
        }
        planned = plan_prefetches(demand, sizes, self._as_if_done(replicas, now_s), spares=spares)
        for name, some in planned.items():
            self._sent.update({(name, each.digest): (each, now_s) for each in some})
        prefetches = {
            name: tuple(
                PrefetchTarget(adapters[each.digest].ref, each.tier, each.uses) for each in some
            )
            for name, some in planned.items()
        }
        return PrefetchList(prefetches, sole_copies(demand, replicas))

    def _as_if_done(self, replicas: dict[str, ReplicaView], now_s: float) -> dict[str, ReplicaView]:
        """Return the replicas as they will be once the prefetches of the last _SETTLES_S seconds
        are done.
        """
        late: dict[str, list[Prefetch]] = defaultdict(list)
        for (name, digest), (prefetch, sent_s) in list(self._sent.items()):
            if now_s - sent_s > _SETTLES_S:
                del self._sent[name, digest]
            elif (
                name in replicas
                and replicas[name].held.get(digest, Residency.REMOTE) < prefetch.tier
            ):
                late[name].append(prefetch)
        return replicas | {name: _with(replicas[name], some) for name, some in late.items()}


def _with(replica: ReplicaView, prefetches: Sequence[Prefetch]) -> ReplicaView:
    return replace(
        replica,
        held={**replica.held, **{each.digest: each.tier for each in prefetches}},
        uses={**replica.uses, **{each.digest: each.uses for each in prefetches}},
    )


def _sizes(reports: Sequence[ReplicaReport]) -> dict[str, int]:
    adapters = (adapter for report in reports for adapter in report.adapters)
    return {each.digest: each.image_bytes for each in adapters if each.image_bytes}


def _view(
    report: ReplicaReport, targets: Mapping[str, PinTarget], sizes: Mapping[str, int]
) -> ReplicaView:
    tiers = report.status.tiers
    pinned = {digest: target.tier for digest, target in targets.items()}
    pinned_bytes = dict.fromkeys(Residency, 0)
    for digest, tier in pinned.items():
        pinned_bytes[tier] += sizes.get(digest, 0)
    return ReplicaView(
        gpu_bytes=tiers[Residency.GPU].capacity_bytes - pinned_bytes[Residency.GPU],
        host_bytes=report.pinnable_bytes(Residency.HOST) - pinned_bytes[Residency.HOST],
        held={each.digest: each.residency for each in report.adapters},
        uses={each.digest: each.uses for each in report.adapters},
        pinned=pinned,
    )
