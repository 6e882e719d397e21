"""Search for the number of replicas and pins, against a trial of every number."""

import math
from dataclasses import replace

import pytest

from lorikeet.simulator import forecast as forecasts
from lorikeet.simulator.capacity import SEEDS, Unreachable, plan_capacity
from lorikeet.simulator.demand import SimulatedDemand, SimulatedTenant
from lorikeet.simulator.forecast import CapacityGoals, CapacityNeeds, ReplicaMemory, forecast
from lorikeet.simulator.workload_models import AZURE_CONV, LengthModel

SHORT = LengthModel(math.log(60), 0.3, math.log(30), 0.3)
CROWD = SimulatedTenant("crowd", 300, (8, 16), 5_242_880, "zipf:0.8", 8.0, SHORT)
RARE = SimulatedTenant("rare", 30, (16,), 5_242_880, "uniform", 0.5, SHORT, ttft_p99_s=0.045)
COUNTED_S = 60.0
MEMORY = ReplicaMemory(gpu_bytes=3 * 2**30, host_bytes=2**30, disk_bytes=2**34)


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a third of the usual time: the search is the same."""
    monkeypatch.setattr(forecasts, "_USUAL_S", COUNTED_S)
    monkeypatch.setattr(forecasts, "_REQUESTS_OF_TENANT", 30)


def needs_of(*tenants, **changes):
    return CapacityNeeds(
        SimulatedDemand(tenants, AZURE_CONV), MEMORY, replace(CapacityGoals(), **changes)
    )


@pytest.mark.parametrize("goal", [{"ttft_p99_s": 0.25}, {"inter_token_p99_s": 0.03}])
def test_no_smaller_fleet_meets_the_goal(goal):
    crowd = replace(CROWD, lengths=AZURE_CONV, rate_per_s=12.0)
    needs = needs_of(crowd, **goal)
    answer = plan_capacity(needs)
    assert answer.needed.met
    assert answer.needed.replicas > 1
    assert answer.one_less.replicas == answer.needed.replicas - 1
    assert not answer.one_less.met
    for replicas in range(1, answer.one_less.replicas):
        assert not forecast(needs, replicas, {}, SEEDS).met


def test_the_forecast_is_for_the_requested_traffic():
    seen = []
    answer = plan_capacity(needs_of(replace(CROWD, rate_per_s=5.0), ttft_p99_s=1.0), seen.append)
    assert answer.needed.replicas == 1
    assert answer.one_less is None
    assert set(seen) == {1}
    tail = answer.needed.tenants["crowd"]
    assert tail == answer.needed.all
    assert tail.requests == pytest.approx(len(SEEDS) * COUNTED_S * 5, rel=0.1)
    assert sum(answer.needed.found.values()) == pytest.approx(1.0)
    steps = needs_of(CROWD).costs.steps
    assert steps.step_s(1, 0) < answer.needed.inter_token_p50_s < 2 * steps.step_s(1, 0)


def test_a_rare_tenant_with_a_goal_is_pinned_and_others_are_not():
    answer = plan_capacity(needs_of(CROWD, RARE, ttft_p99_s=1.0))
    assert set(answer.needed.pins) == {"rare"}
    assert not answer.unpinned.met
    assert answer.unpinned.replicas == answer.needed.replicas
    pinned, without = answer.needed.tenants["rare"], answer.unpinned.tenants["rare"]
    assert pinned.ttft_p99_s <= RARE.ttft_p99_s < without.ttft_p99_s
    assert pinned.hit_rate > 0.99 > without.hit_rate
    image = 16 * 5_242_880
    assert answer.needed.pinned_bytes % image == 0
    assert 0 < answer.needed.pinned_bytes <= 30 * image


def test_a_tenant_without_a_goal_is_not_pinned():
    answer = plan_capacity(needs_of(CROWD, replace(RARE, ttft_p99_s=None), ttft_p99_s=1.0))
    assert answer.needed.pins == {}
    assert answer.unpinned is None


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (needs_of(replace(CROWD, lengths=AZURE_CONV), ttft_p99_s=0.05), "7,.* tokens or more"),
        (needs_of(replace(RARE, ttft_p99_s=0.001)), "rare: .* p99 ≤ 1 ms"),
        (needs_of(CROWD, inter_token_p99_s=0.004), "gets a token every 4.2 ms"),
        (needs_of(replace(CROWD, ranks=(1024,)), ttft_p99_s=1.0), "5.0 GiB does not fit"),
        (needs_of(CROWD, replace(RARE, rate_per_s=1e-4), ttft_p99_s=1.0), "too few"),
        (needs_of(replace(CROWD, rate_per_s=1e-3), ttft_p99_s=1.0), "3.6 requests an hour"),
        (needs_of(CROWD, hit_rate=1.0), "32 replicas still miss: found on the GPU"),
    ],
)
def test_an_unreachable_goal_is_reported_with_its_reason(needs, why):
    with pytest.raises(Unreachable, match=why):
        plan_capacity(needs)


def test_too_much_traffic_is_reported_even_without_a_goal_for_waits():
    demand = SimulatedDemand((replace(CROWD, lengths=AZURE_CONV, rate_per_s=45.0),), AZURE_CONV)
    few = forecast(CapacityNeeds(demand, MEMORY, CapacityGoals(hit_rate=0.01)), 1, {}, SEEDS[:1])
    assert few.missed == []
    assert not few.keeps_up
    assert not few.met
