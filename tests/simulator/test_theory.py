"""Simulator compared with queueing theory and caching theory."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lorikeet.routing.ranking import H200_LLAMA_8B
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.memory import Arena, Link
from lorikeet.simulator.workload_models import Zipf
from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed
from tests.simulator.scenario import Scenario

SMALL = Scenario(adapters=200, replicas=4, duration_s=90.0, warm_up_s=20.0, reshuffle_s=30.0)


def run(scenario):
    fleet = fleet_of(scenario)
    fleet.run()
    return fleet


def fleet_of(scenario):
    return SimulatedFleet(scenario.setup(), scenario.requests())


class Fixed:
    """Length model of one length for prompts and one for answers."""

    def __init__(self, prompt, answer):
        self.lengths = prompt, answer

    def draw(self, rng, requests):
        return tuple(np.full(requests, length) for length in self.lengths)


def test_the_same_seed_gives_the_same_run_and_another_gives_another():
    scenario = replace(SMALL, duration_s=40.0)
    first, again, other = map(run, (scenario, scenario, replace(scenario, seed=2)))
    assert np.array_equal(first.ttft_s, again.ttft_s)
    assert first.loads == again.loads
    assert len(other.ttft_s) != len(first.ttft_s) or not np.array_equal(other.ttft_s, first.ttft_s)


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_prompts_of_one_length_wait_as_in_an_m_d_1_queue(load):
    steps = H200_LLAMA_8B.steps
    lengths = Fixed(steps.step_tokens, 1)  # each prompt has a step of its own
    service_s = steps.prefill_s(steps.step_tokens, 0)
    scenario = Scenario(
        replicas=1,
        base_share=1.0,
        rate_per_s=load / service_s,
        lengths=lengths,
        duration_s=3000.0,
    )
    waits_s = run(scenario).ttft_s - service_s
    # Pollaczek and Khinchine: ρ s / (2 (1 − ρ)).
    assert waits_s.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


def test_decodes_alone_take_one_step_a_token():
    steps = H200_LLAMA_8B.steps
    scenario = Scenario(
        replicas=1,
        base_share=1.0,
        rate_per_s=0.05,
        lengths=Fixed(16, 101),
        duration_s=400.0,
        warm_up_s=0.0,
    )
    fleet = fleet_of(scenario)
    ends_s = []
    (replica,) = fleet.replicas
    end = replica._end
    replica._end = lambda request, now_s: (ends_s.append(now_s), end(request, now_s))
    fleet.run()
    expected_s = fleet.requests.times_s + steps.prefill_s(16, 0) + 100 * steps.step_s(1, 0, 17)
    np.testing.assert_allclose(ends_s, expected_s, rtol=1e-9)


@pytest.mark.parametrize("exponent", [0.8, 1.2])
def test_lru_hits_as_often_as_ches_approximation(exponent):
    adapters, room = 1000, 100
    asked = Zipf(exponent).draw(np.random.default_rng(1), adapters, 100_000).tolist()
    names = [str(adapter) for adapter in range(adapters)]
    arena = Arena(room, [1] * adapters, names, LeastRecentlyUsed(), lambda adapter: None)
    hits = 0
    for at, adapter in enumerate(asked):
        if arena.holds(adapter):
            hits += at >= 20_000
        else:
            assert arena.place(adapter, float(at))
            arena.finish_load(adapter)
        arena.lease(adapter, float(at))
        arena.release(adapter)
    assert hits / 80_000 == pytest.approx(
        che_hit_rate(Zipf(exponent).shares(adapters), room), abs=0.01
    )


def che_hit_rate(shares, room):
    """Return the hit rate of Che, Tung and Wang, 2002: T such that Σ 1 − exp(−p T) = room."""
    low, high = 0.0, 1e9
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if (-np.expm1(-shares * middle)).sum() < room else (low, middle)
    return float((shares * -np.expm1(-shares * low)).sum())


def test_a_leased_adapter_is_not_evicted():
    arena = Arena(2, [1, 1, 1], ["a", "b", "c"], LeastRecentlyUsed(), lambda adapter: None)
    for adapter in (0, 1):
        assert arena.place(adapter, 0.0)
        arena.finish_load(adapter)
        arena.lease(adapter, 0.0)
    assert not arena.place(2, 1.0)
    arena.release(1)
    assert arena.place(2, 2.0)
    assert sorted(arena.residents) == [0, 2]


def test_a_link_carries_loads_one_after_another_and_overlaps_latencies():
    link = Link(latency_s=1.0, bytes_per_s=10.0)
    assert [link.carry(20, 0.0), link.carry(20, 0.0), link.carry(20, 10.0)] == [3.0, 5.0, 13.0]
    assert math.isfinite(link.carry(0, 0.0))


def test_a_hot_adapter_spreads_and_shrinks_back():
    scenario = replace(SMALL, replicas=8, hot_share=0.5, duration_s=120.0)
    fleet = fleet_of(scenario)
    cool = np.flatnonzero((fleet.requests.times_s >= 60.0) & (fleet.requests.adapters == 0))
    for request in cool[cool % 100 != 0].tolist():
        fleet.adapter_of[request] = 1 + request % 199
    copies = []
    for at_s in (59.0, 119.0):
        fleet.schedule(at_s, lambda _: copies.append(len(fleet.on_gpu[0])))
    fleet.run()
    hot, cooled = copies
    assert hot >= 4  # half of the traffic needs four of the eight replicas
    assert cooled <= hot // 2
