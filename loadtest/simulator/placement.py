"""The product's placement in the simulator: every few seconds each replica's prefetches."""

from lorikeet.placement.prefetcher import SURVEY_S, Prefetcher
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import AdapterStatus, EngineStatus, TierStatus


class SimulatedPlacement:
    """Prefetches for a fleet from the beginning of its run to the last request."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet, self._prefetching = fleet, Prefetcher()
        self._refs = [AdapterRef("any", name, 1, name) for name in fleet.names]
        fleet.schedule(SURVEY_S, self._survey)

    def _survey(self, now_s: float) -> None:
        fleet = self._fleet
        if now_s < fleet.requests.times_s[-1]:
            fleet.schedule(now_s + SURVEY_S, self._survey)
        reports = [self._report(replica, now_s) for replica in fleet.replicas]
        prefetches = self._prefetching.decide(reports, {}, now_s, spares=False).prefetches
        for replica in fleet.replicas:
            for each in prefetches.get(replica.name, ()):
                replica.prefetch(int(each.ref.digest), each.tier, each.uses, now_s)

    def _report(self, replica: SimulatedReplica, now_s: float) -> ReplicaReport:
        setup, arena = self._fleet.setup, replica.arena
        held = dict.fromkeys((*arena.residents, *replica.host, *replica.disk))
        rows = tuple(self._adapter(replica, adapter, now_s) for adapter in held)
        tiers = {Residency.GPU: setup.gpu_bytes, Residency.HOST: setup.host_bytes}
        status = EngineStatus(
            tiers={tier: TierStatus(0, 0, size, size, 0) for tier, size in tiers.items()}
        )
        return ReplicaReport(replica.name, "any", status, rows)

    def _adapter(self, replica: SimulatedReplica, adapter: int, now_s: float) -> AdapterStatus:
        ref = self._refs[adapter]
        return AdapterStatus(
            *(ref.tenant, ref.name, ref.version, ref.digest),
            replica.tier(adapter),
            image_bytes=self._fleet.sizes[adapter],
            uses=replica.arena.uses(adapter, now_s),
            pinned=False,
        )
