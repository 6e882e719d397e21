"""One scenario under one router, on the real service and in the simulator."""

from pathlib import Path

from loadtest.fleet.adapters import Stock, number_of
from loadtest.fleet.client import send
from loadtest.fleet.pacing import Pace
from loadtest.fleet.service import OURS, ROOT
from loadtest.simulator.baselines import PowerOfTwo
from lorikeet.settings import Settings
from lorikeet.simulator.fleet import Fleet
from lorikeet.simulator.outcome import Outcome, count
from lorikeet.simulator.traffic import Scenario
from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency.eviction import LeastRecentlyUsed


def settings_of(scenario: Scenario, folder: Path) -> Settings:
    """Of a service with the scenario's fleet; all it writes is in the folder."""
    total = int(scenario.sizes.sum())
    return Settings(
        catalog=str(folder / "catalog"),
        cache_dir=folder / "cache",
        base_models={"lorikeet-demo": ROOT / "demo/model"},
        replicas=scenario.replicas,
        kv_memory=64 << 20,
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
