"""Overload by 200 tenants, each with its own key and adapter.

Answers are long and few of them are streams, so that the engines are saturated and not the HTTP
server, which shares two cores with the engines and with this client. MANY_TENANTS_S sets the
duration in seconds; ten minutes by default.
"""

import asyncio
import itertools
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from loadtest.real_service.adapters import AdapterWeights, save_adapter
from lorikeet.simulator.workload_models import poisson
from lorikeet_engine.adapter_format import BaseShape, read_config, write_blob
from tests.e2e.conftest import ROOT, Service
from tests.e2e.load import Target
from tests.waiting import eventually

TENANTS = 200
SECONDS = float(os.environ.get("MANY_TENANTS_S", "600"))
OVERLOAD = 3.0  # load as a multiple of the service's capacity
AT_ONCE = 200  # concurrent requests while the capacity is measured
MEASURE_S = 30.0
TOKENS = 200
PATIENCE_S = 300.0  # a minute in the queue, then as many sequences share two cores
STREAMED = 10  # one request in this many is streamed
STEADY = 0.05  # largest deviation of memory from its mean after warm-up
WARM = 0.3  # share of the time that counts as warm-up
WARM_RUN_S = 300  # a shorter run is never steady
LOOK_S = 2.0
MODEL = ROOT / "demo" / "model"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 300)]


@pytest.fixture(scope="module")
def tenants(service: Service, tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    """Tenants, each with its own adapter of random weights."""
    folder = tmp_path_factory.mktemp("tenants")
    made = []
    for number in range(TENANTS):
        tenant = f"tenant-{number}"
        service.admin("POST", "/tenants", json={"tenant": tenant}).raise_for_status()
        key = service.admin("POST", f"/tenants/{tenant}/keys", json={}).raise_for_status()
        path = f"/adapters/{tenant}/own/versions?base_model=lorikeet-demo"
        service.admin("PUT", path, content=random_blob(folder, number)).raise_for_status()
        made.append(Target(f"{tenant}/own", key.json()["key"]))
    return made


def random_blob(folder: Path, number: int) -> bytes:
    """Return a random blob of rank 2 to 8 on two linears of the first layer, unique by number."""
    shape, rank = BaseShape.from_config(read_config(MODEL)), (2, 4, 8)[number % 3]
    weights = AdapterWeights(("q_proj", "o_proj"), layers=1)
    alpha = rank * (1 + number / 4096)
    saved = save_adapter(folder / str(number), shape, rank, alpha, weights)
    write_blob(saved, folder / "blob")
    return (folder / "blob").read_bytes()


@dataclass
class Seen:
    """Number of requests by model and status; 200 only if the answer was complete."""

    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    retry_after: list[str | None] = field(default_factory=list)

    def answered(self) -> int:
        return sum(statuses["200"] for statuses in self.statuses.values())


async def capacity_per_s(url: str, targets: list[Target]) -> float:
    """Measure answered requests a second while every adapter is in use."""
    seen, asked = Seen(), itertools.count()

    async def ask_on(client: httpx.AsyncClient) -> None:
        while True:
            await ask(client, next(asked), targets, seen)

    async with client_of(url) as client, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask_on(client)) for _ in range(AT_ONCE)]
        while len(seen.statuses) < len(targets):  # each has been loaded once
            await asyncio.sleep(0.1)
        before, began_s = seen.answered(), time.monotonic()
        await asyncio.sleep(MEASURE_S)
        answered = seen.answered() - before
        for each in asking:
            each.cancel()
    return answered / (time.monotonic() - began_s)


async def send_all(
    url: str, targets: list[Target], rate_per_s: float, seen: Seen, memory: "Memory"
) -> None:
    """Send requests at their arrival times (open loop), from the tenants in rotation."""
    due_s = poisson(rate_per_s).times(np.random.default_rng(0), SECONDS).tolist()
    async with client_of(url) as client, asyncio.TaskGroup() as tasks:
        began_s = time.perf_counter()
        for number, at_s in enumerate(due_s):
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            tasks.create_task(ask(client, number, targets, seen))
            memory.look()


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)


async def ask(client: httpx.AsyncClient, number: int, targets: list[Target], seen: Seen) -> None:
    target, streamed = targets[number % len(targets)], number % STREAMED == 0
    body = {"model": target.model, "prompt": f"{random.random()}", "max_tokens": TOKENS}
    body |= {"stream": streamed, "ignore_eos": True}
    headers = {"authorization": f"Bearer {target.key}"}
    try:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    except httpx.HTTPError as error:
        seen.statuses[target.model][repr(error)] += 1
        return
    status = str(answer.status_code)
    if status == "200" and streamed and not answer.content.endswith(b"data: [DONE]\n\n"):
        status = f"cut: {answer.text[-200:]}"
    if status == "503":
        seen.retry_after.append(answer.headers.get("retry-after"))
    seen.statuses[target.model][status] += 1


class Memory:
    """Resident bytes of the gateway, replicas and engines over time."""

    def __init__(self, service: Service) -> None:
        self.seen: dict[str, list[int]] = defaultdict(list)
        self._processes = list(self._find(service))
        self._looked_s = 0.0

    def look(self) -> None:
        """Record the sizes, at most once in LOOK_S."""
        if time.monotonic() >= self._looked_s + LOOK_S:
            self._looked_s = time.monotonic()
            for name, process in self._processes:
                self.seen[name].append(process.memory_info().rss)

    @staticmethod
    def _find(service: Service) -> Iterator[tuple[str, psutil.Process]]:
        ours = service.catalog
        for process in psutil.process_iter():
            try:
                title = " ".join(process.cmdline())
                if process.environ().get("LORIKEET_CATALOG") != ours:
                    continue
            except psutil.Error:
                continue
            for part in ("gateway", "engine"):
                if part in title:
                    yield f"{part} {process.pid}", process
                    break


def test_overload_by_many_tenants_refuses_some_requests_and_fails_none(
    service: Service, tenants: list[Target]
) -> None:
    seen, memory = Seen(), Memory(service)

    async def run() -> None:
        rate_per_s = OVERLOAD * await capacity_per_s(service.url, tenants)
        await send_all(service.url, tenants, rate_per_s, seen, memory)

    asyncio.run(run())
    everything = sum(seen.statuses.values(), Counter())
    assert set(everything) <= {"200", "429", "503"}
    assert all(wait is not None and int(wait) >= 1 for wait in seen.retry_after)
    assert seen.retry_after, "this was no overload"
    served = {target.model: seen.statuses[target.model]["200"] for target in tenants}
    assert min(served.values()) >= 0.2 * statistics.median(served.values())
    assert eventually(lambda: all(map(is_idle, service.replicas())), within_s=30)
    for name, sizes in memory.seen.items() if SECONDS >= WARM_RUN_S else ():
        warm = sizes[int(len(sizes) * WARM) :]
        mean = statistics.fmean(warm)
        strays = max(mean - min(warm), max(warm) - mean) / mean
        assert strays <= STEADY, f"{name}: {min(warm)} to {max(warm)} bytes"


def is_idle(replica: dict[str, object]) -> bool:
    """Whether a replica runs and queues nothing, and holds no page and no lease."""
    adapters = replica["adapters"]
    assert isinstance(adapters, list)
    busy = replica["running"] or replica["waiting"] or replica["kv_pages_used"]
    return not busy and not any(adapter["leases"] for adapter in adapters)
