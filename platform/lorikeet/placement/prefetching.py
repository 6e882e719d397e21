"""From what the replicas of one base model report to what they should bring nearer."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lorikeet.placement.demand import Demand
from lorikeet.placement.plan import Plan
from lorikeet.placement.popular import Prefetch, ReplicaView, prefetch_popular, sole_copies
from lorikeet.protocol.placement_decision import PinTarget, PrefetchTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency

SURVEY_S = 3.0
"""So often replicas are asked what they hold, an answer that costs an engine milliseconds."""
_SETTLES_S = 30.0
"""An order counts as carried out for so long: it may take a while, or have been refused."""


@dataclass(frozen=True, slots=True)
class PrefetchList:
    """For each replica: what to bring nearer, and what share of adapters in use only it has."""

    prefetches: Mapping[str, tuple[PrefetchTarget, ...]]
    sole_copies: Mapping[str, float]


class Prefetching:
    """Remembers demand, and what was ordered lately, so that nothing is ordered twice."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._ordered: dict[tuple[str, str], tuple[Prefetch, float]] = {}  # replica, digest: when

    def decide(
        self, reports: Sequence[ReplicaReport], plan: Plan, now_s: float, *, spares: bool
    ) -> PrefetchList:
        """To be asked whenever there are new reports. plan: what pins keep on these replicas."""
        self._demand.observe(reports, now_s)
        wanted = self._demand.adapters
        demand = {digest: each.uses for digest, each in wanted.items()}
        sizes = {digest: each.image_bytes for digest, each in wanted.items() if each.image_bytes}
        sizes |= _sizes(reports)
        sites = {each.replica: _site(each, plan.get(each.replica, {}), sizes) for each in reports}
        orders = prefetch_popular(demand, sizes, self._settled(sites, now_s), spares=spares)
        for name, some in orders.items():
            self._ordered.update({(name, each.digest): (each, now_s) for each in some})
        prefetches = {
            name: tuple(
                PrefetchTarget(wanted[each.digest].ref, each.tier, each.uses) for each in some
            )
            for name, some in orders.items()
        }
        return PrefetchList(prefetches, sole_copies(demand, sites))

    def _settled(self, sites: dict[str, ReplicaView], now_s: float) -> dict[str, ReplicaView]:
        """The replicas, as if they had carried out what was ordered lately."""
        late: dict[str, list[Prefetch]] = defaultdict(list)
        for (name, digest), (order, ordered_s) in list(self._ordered.items()):
            if now_s - ordered_s > _SETTLES_S:
                del self._ordered[name, digest]
            elif name in sites and sites[name].held.get(digest, Residency.REMOTE) < order.tier:
                late[name].append(order)
        return sites | {name: _with(sites[name], orders) for name, orders in late.items()}


def _with(site: ReplicaView, orders: Sequence[Prefetch]) -> ReplicaView:
    return replace(
        site,
        held={**site.held, **{each.digest: each.tier for each in orders}},
        uses={**site.uses, **{each.digest: each.uses for each in orders}},
    )


def _sizes(reports: Sequence[ReplicaReport]) -> dict[str, int]:
    adapters = (adapter for report in reports for adapter in report.adapters)
    return {each.digest: each.image_bytes for each in adapters if each.image_bytes}


def _site(
    report: ReplicaReport, keeps: Mapping[str, PinTarget], sizes: Mapping[str, int]
) -> ReplicaView:
    tiers = report.status.tiers
    kept = {digest: keep.tier for digest, keep in keeps.items()}
    pinned = dict.fromkeys(Residency, 0)
    for digest, tier in kept.items():
        pinned[tier] += sizes.get(digest, 0)
    return ReplicaView(
        gpu_bytes=tiers[Residency.GPU].capacity_bytes - pinned[Residency.GPU],
        host_bytes=tiers[Residency.HOST].pinnable_bytes - pinned[Residency.HOST],
        held={each.digest: each.residency for each in report.adapters},
        uses={each.digest: each.uses for each in report.adapters},
        kept=kept,
    )
