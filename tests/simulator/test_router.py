"""The simulator's router, compared with the fleet of a gateway: both rank replicas alike."""

from dataclasses import replace
from random import Random

import pytest

from lorikeet.protocol.messages import Work
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.routing.fleet import Fleet as GatewaysFleet
from lorikeet.routing.ranking import RoutingRequest
from lorikeet.simulator.fleet import LeastCostRouter, SimulatedFleet
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.telemetry.status import EvictionCandidate, LiveStats
from tests.simulator.scenario import Scenario

SCENARIO = Scenario(
    adapters=200,
    gpu_room=0.05,
    disk_room=0.3,
    base_share=0.2,
    hot_share=0.2,
    gateways=1,
    status_age_s=0.0,
)


def ref(fleet: SimulatedFleet, adapter: int) -> AdapterRef:
    return AdapterRef("any", fleet.names[adapter], 1, fleet.names[adapter])


def ask(fleet: SimulatedFleet, adapter: int | None, prompt_tokens: int) -> RoutingRequest:
    if adapter is None:
        return RoutingRequest(Work(prompt_tokens))
    work = Work(prompt_tokens, fleet.ranks[adapter], fleet.sizes[adapter])
    return RoutingRequest(work, ref(fleet, adapter))


def live_stats(replica: SimulatedReplica, now_s: float) -> LiveStats:
    """Return the status that an engine in this replica's state would report."""
    arena, status, victim = replica.arena, replica.status, None
    if arena._front():
        _, adapter = arena._by_score[0]
        victim = EvictionCandidate(arena._sizes[adapter], arena.uses(adapter, now_s))
    return LiveStats(
        decoding=status.running,
        waiting=status.waiting,
        pending_tokens=status.waiting_tokens,
        pending_seen=status.waiting_seen,
        ranks=status.ranks,
        context=status.context,
        loading_bytes=status.loading_bytes,
        free_bytes=arena.free,
        room_bytes=arena.room,
        victim=victim,
    )


def gateways_fleet(fleet: SimulatedFleet, now_s: float) -> GatewaysFleet:
    """Make the fleet of a gateway that sent all current requests and has the latest status."""
    known = GatewaysFleet(lambda: now_s, Random(1), fleet.setup.costs)
    known.set_replicas([replica.name for replica in fleet.replicas])
    for replica in fleet.replicas:
        for adapter in (*replica.waiting, *replica.decoding):
            request_id = f"{replica.name} {adapter}"
            known.on_begun(request_id)
            known.assign(request_id, replica.name, ask(fleet, adapter, 1))
            if adapter in replica.decoding:
                known.on_first_bytes(request_id)
        held = (*replica.arena.residents, *replica.host, *replica.disk)
        moved = {fleet.names[adapter]: replica.tier(adapter) for adapter in held}
        known.on_status_update(
            replica.name, StatusUpdate(1, live_stats(replica, now_s), moved), age_s=0.0
        )
    return known


class Compared(LeastCostRouter):
    """The simulator's router, compared with a gateway's fleet at every tenth request."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.looked_at: list[int] = []

    def rank(self, fleet, request, now_s):
        simulated = super().rank(fleet, request, now_s)
        if request % 10 == 0:
            asked = ask(fleet, fleet.adapter_of[request], fleet.prompts[request])
            real = gateways_fleet(fleet, now_s).rank_replicas(asked)
            ours = [each._replace(replica=each.replica.name) for each in simulated]
            both = {each.replica for each in ours} & {each.replica for each in real}
            assert [each for each in ours if each.replica in both] == [
                each for each in real if each.replica in both
            ]
            self.looked_at.append(len(both))
        return simulated


@pytest.mark.parametrize("replicas", [2, 6])
def test_the_simulator_and_a_gateways_fleet_rank_equal_candidates_alike(replicas):
    scenario, router = replace(SCENARIO, replicas=replicas, duration_s=120.0 / replicas), Compared()
    fleet = SimulatedFleet(scenario.setup(), scenario.requests())
    fleet.router = router
    fleet.run()
    assert len(router.looked_at) > 100
    assert sum(router.looked_at) > 1.5 * len(router.looked_at)
    if replicas == 2:  # so that a sample has replicas of both kinds
        assert set(router.looked_at) == {2}
