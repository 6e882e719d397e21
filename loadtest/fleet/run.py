"""One scenario under one router, on the real service and in the simulator."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from loadtest.fleet.adapters import Stock, number_of
from loadtest.fleet.client import send
from loadtest.fleet.pacing import Pace
from loadtest.fleet.service import OURS, ROOT
from loadtest.simulator.baselines import PowerOfTwo
from loadtest.simulator.trial import measure
from lorikeet.settings import Settings
from lorikeet.simulator.fleet import Fleet
from lorikeet.simulator.outcome import Outcome, count
from lorikeet.simulator.traffic import Requests, Scenario
from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency.eviction import LeastRecentlyUsed

_COLD, _PROBES = 5, 16


def settings_of(scenario: Scenario, folder: Path) -> Settings:
    """Of a service with the scenario's fleet; all it writes is in the folder."""
    total = int(scenario.sizes.sum())
    return Settings(
        catalog=str(folder / "catalog"),
        cache_dir=folder / "cache",
        base_models={"lorikeet-demo": ROOT / "demo/model"},
        replicas=scenario.replicas,
        kv_memory=64 << 20,
        max_batch_tokens=scenario.costs.steps.step_tokens,
        max_running=scenario.costs.steps.max_running,
        adapter_gpu_memory=max(int(total * scenario.gpu_room), int(scenario.sizes.max())),
        adapter_host_memory=int(total * scenario.host_room),
    )


def pace_of(scenario: Scenario, stock: Stock, router: str, folder: Path) -> Pace:
    """Of each engine of that service."""
    return Pace(
        scenario.costs.steps,
        scenario.costs.loads,
        dict(zip(stock.digests, scenario.sizes.tolist(), strict=True)),
        disk_bytes=int(scenario.sizes.sum() * scenario.disk_room),
        lru=router != OURS,
        loads_file=folder / "loads",
    )


def router_options(scenario: Scenario, router: str) -> dict[str, float]:
    """What a router in ROUTERS is told."""
    if router == OURS:
        costs = scenario.costs
        return {name: getattr(costs, name) for name in ("answer_tokens", "copy_s", "lost_use_s")}
    if router == "multiplexing":
        # As many as a replica has room for, a tenth less: what Serve's users would set.
        return {"models": round(0.9 * scenario.gpu_room * scenario.adapters)}
    return {}


def measure_overhead_s(url: str, key: str, scenario: Scenario) -> float:
    """What HTTP, gateway and replica add to the first token of a request that is alone."""
    steps, tokens = scenario.costs.steps, 8
    each = np.full(_PROBES, tokens)
    times_s = np.arange(_PROBES) * (2 * steps.prefill_s(tokens, 1) + 0.2)
    probes = Requests(times_s, np.zeros_like(each), each, np.ones_like(each))
    _, served = send(url, key, probes)
    rank = int(scenario.ranks[0])
    return median(one.ttft_s for one in served[_COLD:]) - steps.prefill_s(tokens, rank)


def measure_real(url: str, key: str, scenario: Scenario, router: str, loads_file: Path) -> Outcome:
    """Send the scenario's requests to the running service. Raises Unanswered."""
    requests = scenario.requests()
    began_s, served = send(url, key, requests)
    # Noted as the simulator notes what it simulates, and counted as that is.
    fleet = Fleet(scenario.setup(), requests, PowerOfTwo(0), LeastRecentlyUsed())
    replicas = sorted({one.replica for one in served})
    fleet.ttft_s[:] = [one.ttft_s for one in served]
    fleet.found[:] = [Residency[one.residency.upper()] for one in served]
    fleet.served_by[:] = [replicas.index(one.replica) for one in served]
    for line in loads_file.read_text().splitlines():
        at_s, model = line.split()
        fleet.loads.append((float(at_s) - began_s, fleet.sizes[number_of(model)]))
    return count(router, fleet)


def measure_simulated(scenario: Scenario, router: str, overhead_s: float) -> Outcome:
    """The same in the simulator, which knows nothing of what a request's way there takes."""
    found = measure((scenario, router))
    p50_s, p99_s = found.ttft_p50_s + overhead_s, found.ttft_p99_s + overhead_s
    return replace(found, ttft_p50_s=p50_s, ttft_p99_s=p99_s)
