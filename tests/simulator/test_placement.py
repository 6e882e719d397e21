"""Prefetches by the simulated controller, and their cost."""

from dataclasses import replace

import numpy as np
import pytest

from loadtest.simulator.scenario import Scenario
from lorikeet.placement.prefetcher import SURVEY_S, Prefetcher
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.memory import Arena
from lorikeet.simulator.router import LeastCostRouter
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.residency.eviction_score import LeastUsedForItsSize
from lorikeet_engine.telemetry.status import AdapterStatus, EngineStatus, TierStatus
from tests.simulator.idle import idle

SMALL = Scenario(adapters=200, replicas=4, gpu_room=0.15, host_room=0.2, duration_s=60.0, load=0.5)


class SimulatedPlacement:
    """Prefetches for a fleet from the beginning of its run to the last request."""

    def __init__(self, fleet):
        self._fleet, self._prefetching = fleet, Prefetcher()
        self._refs = [AdapterRef("any", name, 1, name) for name in fleet.names]
        fleet.schedule(SURVEY_S, self._survey)

    def _survey(self, now_s):
        fleet = self._fleet
        if now_s < fleet.requests.times_s[-1]:
            fleet.schedule(now_s + SURVEY_S, self._survey)
        reports = [self._report(replica, now_s) for replica in fleet.replicas]
        prefetches = self._prefetching.decide(reports, {}, now_s, spares=False).prefetches
        for replica in fleet.replicas:
            for each in prefetches.get(replica.name, ()):
                replica.prefetch(int(each.ref.digest), each.tier, each.uses, now_s)

    def _report(self, replica, now_s):
        setup, arena = self._fleet.setup, replica.arena
        held = dict.fromkeys((*arena.residents, *replica.host, *replica.disk))
        rows = tuple(self._adapter(replica, adapter, now_s) for adapter in held)
        tiers = {Residency.GPU: setup.gpu_bytes, Residency.HOST: setup.host_bytes}
        status = EngineStatus(
            tiers={tier: TierStatus(0, 0, size, size, 0) for tier, size in tiers.items()}
        )
        return ReplicaReport(replica.name, "any", status, rows)

    def _adapter(self, replica, adapter, now_s):
        ref = self._refs[adapter]
        return AdapterStatus(
            *(ref.tenant, ref.name, ref.version, ref.digest),
            replica.tier(adapter),
            image_bytes=self._fleet.sizes[adapter],
            uses=replica.arena.uses(adapter, now_s),
            pinned=False,
        )


def run(scenario, act=None):
    fleet = SimulatedFleet(
        scenario.setup(), scenario.requests(), LeastCostRouter(1), LeastUsedForItsSize()
    )
    SimulatedPlacement(fleet)
    if act is not None:
        act(fleet)
    fleet.run()
    return fleet


def arena_of(*used):
    """Make an arena for three adapters.

    used: number of uses at time 0 of adapters 0, 1 and so on.
    """
    left = []
    arena = Arena(6, [2] * 6, [str(n) for n in range(6)], LeastUsedForItsSize(), left.append)
    for adapter, uses in enumerate(used):
        assert arena.place(adapter, 0.0)
        arena.finish_load(adapter)
        for _ in range(uses):
            arena.lease(adapter, 0.0)
            arena.release(adapter)
    return arena, left


def test_a_prefetch_uses_free_memory_first():
    arena, left = arena_of(1, 1)
    assert arena.prefetch(3, 0.5, 0.0)
    assert left == []
    assert not arena.holds(3)
    arena.finish_load(3)
    assert arena.holds(3)


def test_a_prefetch_evicts_only_adapters_of_lower_score():
    arena, left = arena_of(4, 2, 8)
    assert not arena.prefetch(3, 1.5, 0.0)
    assert left == []
    assert arena.prefetch(3, 3.0, 0.0)
    assert left == [1]
    arena.finish_load(3)
    assert not arena.prefetch(4, 2.5, 0.0)  # its score counts the 3 uses that it was prefetched for
    assert arena.prefetch(4, 3.5, 0.0)
    assert left == [1, 3]


def test_a_prefetch_never_evicts_a_leased_adapter():
    arena, left = arena_of(1, 1, 1)
    for adapter in range(3):
        arena.lease(adapter, 0.0)
    assert not arena.prefetch(3, 100.0, 0.0)
    assert left == []


@pytest.mark.parametrize("changes", [{}, {"disk_room": 0.3, "host_room": 0.1}])
def test_a_run_with_placement_ends_idle(changes):
    scenario = replace(SMALL, **changes)
    fleet = run(scenario)
    assert np.isfinite(fleet.ttft_s).all()
    for replica in fleet.replicas:
        assert idle(replica)
        assert replica.status.loading_bytes == 0
        held = sum(fleet.sizes[adapter] for adapter in replica.arena.residents)
        assert replica.arena.free == fleet.setup.gpu_bytes - held
        assert replica.arena.room == fleet.setup.gpu_bytes
        for adapter in replica.arena.residents:
            assert replica in fleet.on_gpu[adapter]
    assert sum(map(len, fleet.on_gpu)) == sum(len(one.arena.residents) for one in fleet.replicas)


def test_a_new_replica_prefetches_adapters_before_requests_for_them():
    def join(fleet):
        fleet.schedule(30.0, fleet.add_replica)

    fleet = run(SMALL, join)
    joined = fleet.replicas[-1]
    asked = set(fleet.requests.adapters[fleet.served_by == joined.number].tolist())
    near = {*joined.arena.residents, *joined.host}
    assert near - asked


def test_a_request_takes_over_a_running_prefetch():
    fleet = SimulatedFleet(
        replace(SMALL, disk_room=0.0).setup(),
        SMALL.requests(),
        LeastCostRouter(1),
        LeastUsedForItsSize(),
    )
    replica, (request, adapter) = fleet.replicas[0], (0, fleet.adapter_of[0])
    replica.prefetch(adapter, Residency.GPU, 1.0, 0.0)
    assert replica.submit(request, 0.001) is Residency.REMOTE
    assert adapter in replica.waiting
    while fleet._events:
        fleet._run_until(fleet._events[0][0])
    assert idle(replica)
    assert replica.status.loading_bytes == 0
    assert len(fleet.loads) == 1
