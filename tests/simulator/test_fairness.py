"""Noisy tenant in a simulated fleet, beside a tenant below or above its fair share."""

import numpy as np
import pytest

from lorikeet.routing.ranking import H200_LLAMA_8B, capacity_per_s
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.router import LeastCostRouter
from lorikeet.simulator.traffic import FleetSetup, Requests
from lorikeet_engine.residency.eviction_score import LeastUsedForItsSize
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN, PROMPT_TOKEN

QUIET, NOISY = 0, 1
REPLICAS, LASTS_S = 3, 60.0
PROMPTS, ANSWERS = (100, 900), (50, 350)  # tokens, smallest and largest
STEPS = H200_LLAMA_8B.steps
CAPACITY = REPLICAS * capacity_per_s(H200_LLAMA_8B, np.mean(PROMPTS), np.mean(ANSWERS), 0)
BOUND = 2 * max(PROMPT_TOKEN * PROMPTS[1], OUTPUT_TOKEN * STEPS.max_running * sum(PROMPTS))


class Run:
    """Run of a fleet under two tenants' loads, given as shares of the fleet's capacity.

    spread: largest change of the difference between the tenants' counters on any replica, while
    both waited.
    """

    def __init__(self, quiet, noisy):
        times_s, tenants = [], []
        for tenant, load in ((QUIET, quiet), (NOISY, noisy)):
            rng = np.random.default_rng(tenant)
            count = rng.poisson(load * CAPACITY * LASTS_S)
            times_s.append(rng.uniform(0.0, LASTS_S, count))
            tenants.append(np.full(count, tenant))
        times_s, tenants = np.concatenate(times_s), np.concatenate(tenants)
        order, count, rng = times_s.argsort(), len(times_s), np.random.default_rng(2)
        requests = Requests(
            times_s[order],
            np.full(count, -1),
            rng.integers(*PROMPTS, count),
            rng.integers(*ANSWERS, count),
            tenants[order],
        )
        one = np.array([1])
        setup = FleetSetup(
            replicas=REPLICAS, ranks=one, sizes=one, gpu_bytes=1, host_bytes=1, disk_bytes=1
        )
        self.fleet = SimulatedFleet(setup, requests, LeastCostRouter(1), LeastUsedForItsSize())
        self.tenants, self.spread = requests.tenants, 0.0
        self.fleet.schedule(0.0, self.look)
        self.fleet.run()

    def look(self, now_s):
        for replica in self.fleet.replicas:
            counters = [counter.value for counter in replica.queue.waiting.values()]
            self.spread = max(self.spread, np.ptp(counters) if counters else 0.0)
        if now_s < LASTS_S:
            self.fleet.schedule(now_s + 0.02, self.look)

    def p99_s(self, tenant):
        return float(np.quantile(self.fleet.ttft_s[self.tenants == tenant], 0.99))


@pytest.fixture(scope="module")
def alike():
    """Run in which each tenant sends more than half of the fleet's capacity."""
    return Run(0.7, 0.7)


@pytest.fixture(scope="module")
def one_noisy():
    return Run(0.7, 7.0)


def test_the_tenants_served_tokens_differ_by_at_most_the_bound_on_each_replica(one_noisy):
    assert one_noisy.spread <= BOUND / 2, "so the difference changes by the bound at most"
    assert one_noisy.p99_s(NOISY) > 60, "it asks for much more than it gets"


def test_a_tenant_with_ten_times_the_load_delays_the_other_little(alike, one_noisy):
    assert one_noisy.p99_s(QUIET) < 1.25 * alike.p99_s(QUIET)


def test_a_tenant_below_its_share_does_not_wait():
    run = Run(0.3, 3.0)
    assert run.p99_s(QUIET) < 0.3
    assert run.p99_s(NOISY) > 60
