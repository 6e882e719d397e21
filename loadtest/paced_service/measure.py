"""One scenario under one router, on the real service and in the simulator."""

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from loadtest.client import Server, Session, encode_requests, send_all
from loadtest.cluster import ROOT
from loadtest.paced_service.pacing import Pace
from loadtest.ports import free_port
from loadtest.real_service.adapters import FilledCatalog, model_name, number_of
from loadtest.report import all_whole, lateness_s, ttfts_s
from loadtest.simulator.baselines import PowerOfTwo
from loadtest.simulator.goals import OURS
from loadtest.simulator.outcome import Outcome, summarize
from loadtest.simulator.scenario import Scenario
from loadtest.simulator.trials import measure
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from lorikeet.addresses import Address
from lorikeet.routing.ranking import H200_LLAMA_8B
from lorikeet.settings import Settings
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.traffic import Requests
from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed
from lorikeet_engine.traffic import Floats

_COLD, _PROBES = 5, 16
_VOCABULARY = 262  # the demo model's


@dataclass(frozen=True, slots=True)
class RunNotes:
    """Notes on a run on the real service.

    slip: by how much steps took longer than they were paced, as a share. late_s: the most by which
    a request was sent after it was due. prefetches: loads onto GPUs while requests counted that no
    request asked for; they are no cold loads.
    """

    slip: float
    late_s: float
    prefetches: int


def settings_of(scenario: Scenario, folder: Path) -> Settings:
    """Settings of a service with the scenario's fleet; all it writes is in the folder."""
    total = int(scenario.sizes.sum())
    return Settings(
        catalog=str(folder / "catalog"),
        cache_dir=folder / "cache",
        admin_address=Address("127.0.0.1", free_port()),
        base_models={"lorikeet-demo": ROOT / "demo/model"},
        replicas=scenario.replicas,
        kv_cache_memory=64 << 20,
        max_batch_tokens=scenario.costs.steps.step_tokens,
        max_running=scenario.costs.steps.max_running,
        adapter_gpu_memory=max(int(total * scenario.gpu_room), int(scenario.sizes.max())),
        adapter_host_memory=int(total * scenario.host_room),
    )


def pace_of(scenario: Scenario, stock: FilledCatalog, router: str, folder: Path) -> Pace:
    """The pace of each engine of that service."""
    return Pace(
        scenario.costs.steps,
        scenario.costs.loads,
        dict(zip((ref.digest for ref in stock.refs), scenario.sizes.tolist(), strict=True)),
        disk_bytes=int(scenario.sizes.sum() * scenario.disk_room),
        lru=router != OURS,
        notes=folder,
    )


def router_options(scenario: Scenario, router: str) -> dict[str, float]:
    """The options of a router in ROUTERS."""
    if router == OURS:
        costs = scenario.costs
        # The gateway raises a copy's price by as much as a step is longer than the usual one; here
        # steps are longer than requests are, by what is saved in tokens.
        pace = costs.steps.step_s(1, 0) / H200_LLAMA_8B.steps.step_s(1, 0)
        return {
            "answer_tokens": costs.answer_tokens,
            "copy_s": costs.copy_s / pace,
            "evicted_use_s": costs.evicted_use_s,
        }
    if router == "multiplexing":
        # As many as a replica has room for, a tenth less: what Serve's users would set.
        return {"models": round(0.9 * scenario.gpu_room * scenario.adapters)}
    return {}


def send(url: str, key: str, requests: Requests) -> tuple[float, list[StreamedAnswer]]:
    """Send all requests when they are due; the first's Unix time, and the answers in order.

    Raises RuntimeError if one is not whole.
    """
    columns = requests.times_s, requests.adapters, requests.prompts, requests.answers
    rows = zip(*(column.tolist() for column in columns), strict=True)
    sessions = [
        Session(at_s, (LoadRequest(model_name(adapter), prompt, answer, seed=number),))
        for number, (at_s, adapter, prompt, answer) in enumerate(rows)
    ]
    made = encode_requests(Server(url, key, _VOCABULARY), sessions)
    unix_s, start_s = time.time(), time.monotonic()
    answers = asyncio.run(send_all(url, sessions, made, start_s))
    return unix_s, sorted(all_whole(answers), key=lambda answer: answer.request.seed)


def measure_overhead_s(url: str, key: str, scenario: Scenario) -> float:
    """What HTTP, gateway and replica add to the first token of a request that is alone."""
    steps, tokens = scenario.costs.steps, 8
    each = np.full(_PROBES, tokens)
    times_s = np.arange(_PROBES) * (2 * steps.prefill_s(tokens, 1) + 0.2)
    probes = Requests(times_s, np.zeros_like(each), each, np.ones_like(each))
    _, answers = send(url, key, probes)
    rank = int(scenario.ranks[0])
    return median(ttfts_s(answers[_COLD:])) - steps.prefill_s(tokens, rank)


def measure_real(
    url: str, key: str, scenario: Scenario, router: str, notes: Path
) -> tuple[Outcome, RunNotes]:
    """Send the scenario's requests to the running service. notes: Pace's.

    Raises RuntimeError if an answer is not whole.
    """
    requests = scenario.requests()
    before_s = _steps_s(notes)
    began_s, answers = send(url, key, requests)
    owed_s, took_s = _steps_s(notes) - before_s
    # Noted as the simulator notes what it simulates, and counted as that is.
    fleet = SimulatedFleet(scenario.setup(), requests, PowerOfTwo(0), LeastRecentlyUsed())
    replicas = sorted({answer.replica for answer in answers})
    fleet.ttft_s[:] = ttfts_s(answers)
    fleet.found[:] = [Residency[answer.residency.upper()] for answer in answers]
    fleet.served_by[:] = [replicas.index(answer.replica) for answer in answers]
    prefetches = 0
    for line in (notes / "loads").read_text().splitlines():
        unix_s, model, requested = line.split()
        at_s = float(unix_s) - began_s
        if requested == "True":
            fleet.loads.append((at_s, fleet.sizes[number_of(model)]))
        else:
            prefetches += at_s >= scenario.warm_up_s
    late_s = max(lateness_s(answers))
    return summarize(router, fleet), RunNotes(took_s / owed_s - 1.0, late_s, prefetches)


def measure_simulated(scenario: Scenario, router: str, overhead_s: float) -> Outcome:
    """Simulate the scenario, and add the overhead that the simulator does not know."""
    found = measure((scenario, router))
    p50_s, p99_s = found.ttft_p50_s + overhead_s, found.ttft_p99_s + overhead_s
    return replace(found, ttft_p50_s=p50_s, ttft_p99_s=p99_s)


def _steps_s(notes: Path) -> Floats:
    """What all steps so far were to take, and what they took; [2]."""
    found = [path.read_text().split() for path in notes.glob("steps-*")]
    return np.array(found, float).reshape(-1, 2).sum(0)
