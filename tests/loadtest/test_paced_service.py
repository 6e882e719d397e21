"""The real service on paced engines does what the simulator says of it."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from loadtest.paced_service import routers
from loadtest.paced_service.scenario import SCENARIOS, USUAL, lasting, slowed
from loadtest.paced_service.service import ROUTERS
from loadtest.real_service.adapters import model_name, number_of
from loadtest.simulator.trials import measure
from lorikeet.serving.fleet_registry import fleet_of


@pytest.fixture
def compare(tmp_path):
    """One run under the product's router and its simulation, by a program of its own."""

    def compare(scenario, **sizes):
        out = tmp_path / "fleet.json"
        options = [f"--{name}={value}" for name, value in sizes.items()]
        command = [
            sys.executable,
            "-m",
            "loadtest.paced_service",
            "--scenarios",
            scenario,
            *options,
        ]
        command += ["--routers", "lorikeet", "--json", str(out)]
        assert subprocess.run(command).returncode in (0, 1)  # 1: it is not as close as on its own
        (pair,) = json.loads(out.read_text())["runs"]
        return pair["real"], pair["simulated"]

    return compare


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_small_fleet_answers_everything_and_hits_as_the_simulator_says(compare):
    """The run fails unless every request is answered completely."""
    real, simulated = compare("zipf 1.0", replicas=3, adapters=300, seconds=20, slowdown=2)
    small = slowed(replace(SCENARIOS["zipf 1.0"], replicas=3, adapters=300), 2)
    others = measure((lasting(small, 20), "power of two"))
    assert real["requests"] == simulated["requests"] == others.requests
    assert real["hit_rate"] > others.hit_rate
    assert real["hit_rate"] == pytest.approx(simulated["hit_rate"], abs=0.15)
    assert 0.7 < real["ttft_p50_s"] / simulated["ttft_p50_s"] < 2.5


@pytest.mark.soak
def test_first_tokens_of_four_replicas_come_when_the_simulator_says(compare):
    real, simulated = compare("zipf 1.0", replicas=4, adapters=1000, seconds=240, slowdown=2.5)
    for quantile in ("ttft_p50_s", "ttft_p99_s"):
        assert real[quantile] == pytest.approx(simulated[quantile], rel=0.15)


def test_slow_motion_changes_times_and_nothing_else():
    fast, slow = USUAL, slowed(USUAL, 3.0)
    assert slow.rate == pytest.approx(fast.rate / 3)
    assert slow.costs.loads.remote_latency_s == pytest.approx(3 * fast.costs.loads.remote_latency_s)
    assert slow.costs.steps.step_s(5, 64) == pytest.approx(3 * fast.costs.steps.step_s(5, 64))
    assert slow.costs.steps.max_running == fast.costs.steps.max_running
    assert list(slow.sizes) == list(fast.sizes)


def test_adapters_are_known_by_the_names_that_requests_and_logs_use():
    assert number_of(model_name(12)) == number_of(f"{model_name(12)}@1") == 12


@pytest.mark.parametrize("router", ROUTERS.values())
def test_under_every_router_a_gateway_reaches_each_replica_by_its_name(router):
    """So it opens the streams on which their answers come."""
    deployment = DeploymentID("engine", app_name=router)
    named = [ReplicaID(name, deployment) for name in ("a", "b", "c")]
    replicas = [SimpleNamespace(replica_id=one, routing_stats={}) for one in named]

    async def scenario():
        made = getattr(routers, router)(deployment, DeploymentHandleSource.REPLICA)
        made.initialize_state()
        made.update_replicas(replicas)
        asked = SimpleNamespace(args=(), kwargs={"replica": "b"}, routing_context=SimpleNamespace())
        return await made.choose_replicas(replicas, asked)

    assert asyncio.run(scenario()) == [[replicas[1]]]
    assert set(fleet_of(router, "engine").replicas) == {"a", "b", "c"}
