"""Ends of runs, pins, and the records of requests and tokens."""

from dataclasses import replace

import numpy as np
import pytest

from lorikeet.rendezvous import by_preference
from lorikeet.routing.ranking import RoutingStatus
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet_engine.adapter import Residency
from tests.simulator.idle import idle
from tests.simulator.scenario import Scenario

SMALL = Scenario(
    adapters=200, replicas=4, gpu_room=0.15, duration_s=60.0, warm_up_s=20.0, reshuffle_s=30.0
)


def fleet_of(scenario, **changes):
    setup = replace(scenario.setup(), **changes)
    return SimulatedFleet(setup, scenario.requests())


@pytest.mark.parametrize(
    "changes", [{}, {"disk_room": 0.1, "host_room": 0.05}, {"base_share": 0.3}]
)
def test_a_run_ends_idle(changes):
    fleet = fleet_of(replace(SMALL, **changes))
    fleet.run()
    steps, prompts = fleet.setup.costs.steps, fleet.requests.prompts
    cheapest_s = min(steps.rows_s(n) / n for n in range(1, steps.step_tokens + 1))
    least_s = cheapest_s * prompts + steps.prompt_seen_s * prompts**2 / 2
    assert (fleet.ttft_s >= least_s - 1e-9).all()
    for replica in fleet.replicas:
        assert idle(replica)
        assert replica.status == RoutingStatus()
        held = sum(fleet.sizes[adapter] for adapter in replica.arena.residents)
        assert replica.arena.free == fleet.setup.gpu_bytes - held
        assert replica.arena.room == fleet.setup.gpu_bytes
    tiers = zip(fleet.on_gpu, fleet.on_host, fleet.on_disk, strict=True)
    for adapter, holders in enumerate(tiers):
        truth = [
            [one.number for one in fleet.replicas if adapter in held(one)]
            for held in (lambda r: r.arena.residents, lambda r: r.host, lambda r: r.disk)
        ]
        assert [sorted(one.number for one in tier) for tier in holders] == truth


def test_pinned_adapters_are_always_hits():
    rare = np.argsort(np.bincount(SMALL.requests().adapters, minlength=200))[20:25].tolist()
    with_pins = fleet_of(SMALL, pins=dict.fromkeys(rare, 2))
    with_pins.run()
    asked = np.isin(with_pins.requests.adapters, rare)
    assert asked.sum() > 5
    assert with_pins.hits[asked].all()
    assert not all(run_hits(fleet_of(SMALL), asked))
    for adapter in rare:
        preferred = by_preference(str(adapter), map(str, range(4)))[:2]
        assert {str(one.number) for one in with_pins.on_gpu[adapter]} >= set(preferred)
    assert all(idle(replica) for replica in with_pins.replicas)


def run_hits(fleet, asked):
    fleet.run()
    return fleet.hits[asked]


def test_pins_leave_memory_for_the_largest_adapter():
    fleet = fleet_of(SMALL, pins=dict.fromkeys(range(200), 4))
    largest = max(fleet.sizes)
    assert all(largest <= replica.arena.room < 2 * largest for replica in fleet.replicas)
    fleet.run()
    assert np.isfinite(fleet.ttft_s).all()


def test_each_request_records_its_adapters_tier():
    fleet = fleet_of(replace(SMALL, base_share=0.2, disk_room=0.2))
    fleet.run()
    assert set(fleet.found.tolist()) == set(Residency)
    assert fleet.hits[fleet.requests.adapters < 0].all()
    slow = [fleet.ttft_s[fleet.found == tier].mean() for tier in sorted(Residency, reverse=True)]
    assert slow[0] < slow[1]
    assert slow[2] < slow[3]


def test_each_token_but_the_first_records_a_gap_as_long_as_its_step():
    scenario = replace(SMALL, warm_up_s=0.0, duration_s=20.0)
    fleet = fleet_of(scenario)
    fleet.run()
    tokens = (fleet.requests.answers - 1).sum()
    assert sum(fleet.gaps.values()) == pytest.approx(tokens, rel=1e-6)
    steps = scenario.costs.steps
    full = steps.step_tokens
    context = steps.max_running * scenario.context
    most_s = steps.step_s(full, 128 * 64, context, adapted=full, seen=full * scenario.context)
    assert min(fleet.gaps) * 1e-4 >= steps.step_s(1, 0) - 1e-4
    assert max(fleet.gaps) * 1e-4 <= most_s
