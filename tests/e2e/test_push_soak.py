"""Eight tenants push a version every two seconds: no token comes of a wrong version, nothing grows.

PUSH_SOAK_S: duration in seconds, half an hour by default.
PUSH_SOAK_REPLICAS: number of engines, four by default.

Most versions are ephemeral; every tenth is to be durable.
"""

import itertools
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from demo.fill_catalog import fill_catalog
from lorikeet.client import Client, PushResult, SampledChoice
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import write_blob
from tests.e2e.conftest import Service, free_port
from tests.e2e.random_adapters import Reference, write_adapter
from tests.metrics.scraping import Scraped

SECONDS = float(os.environ.get("PUSH_SOAK_S", "1800"))
REPLICAS = os.environ.get("PUSH_SOAK_REPLICAS", "4")
APPLICATION = "soaked"
TENANTS = 8
EVERY_S = 2.0
DURABLE_EVERY = 10
SEEDS = range(6)
PROMPTS = ("Mira sends twelve parcels", "a word spelt", "lorikeet")
TOKENS = 6
NEAR = 0.02
"""Tolerance of log probabilities: another order of float32, alphas that differ in digit six."""
LOOK_S = 5.0
STEADY_RUN_S = 300
"""Seconds; a shorter run is never steady."""
GROWTH = 1.05
FEW_FILES = 4
"""Allowed growth in the number of open files."""
STORE_CONNECTIONS = 16
"""More for the controller: connections that it keeps open after many concurrent reads."""
DISK_BYTES = 2 * 2**20
"""Bytes of the disk cache, full after some minutes; pins and new files may exceed the limit."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 600)]


@pytest.fixture
def soaked(service: Service, s3_bucket: str, tmp_path: Path) -> Iterator[tuple[Service, Path]]:
    """Separate application beside the session's, and its cache folder."""
    from ray import serve

    from lorikeet.serving.deployments import controller, engine, gateway

    cache = tmp_path / "cache"
    settings = Settings.from_env(
        {
            "LORIKEET_CATALOG": f"{s3_bucket}/push-soak",
            "LORIKEET_CACHE_DIR": str(cache),
            "LORIKEET_ADMIN_ADDRESS": f"127.0.0.1:{free_port()}",
            "LORIKEET_REPLICAS": REPLICAS,
            "LORIKEET_ADAPTER_DISK": str(DISK_BYTES),
            # full after some minutes, too: the memory in use grows until then
            "LORIKEET_ADAPTER_GPU_MEMORY": "2MiB",
            "LORIKEET_ADAPTER_HOST_MEMORY": "8MiB",
        }
    )
    keys = fill_catalog(settings, tmp_path / "keys")
    engines = {name: engine(settings, name) for name in settings.base_models}
    app = gateway(settings, engines, controller(settings, engines))
    serve.run(app, name=APPLICATION, route_prefix=f"/{APPLICATION}")
    admin_url = f"http://{settings.admin_address}"
    url = f"{service.url}/{APPLICATION}"
    yield Service(url, admin_url, settings.catalog, keys.admin, keys.tenants), cache
    serve.delete(APPLICATION)


@dataclass
class Tenant:
    """Tenant that pushes to an adapter and samples from it.

    seeds: seed of each pushed version, by digest.
    order: digests in order of the pushes.
    acknowledged: number of acknowledged pushes.
    wrong: descriptions of errors.
    """

    name: str
    client: Client
    folder: Path
    reference: Reference
    seeds: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    acknowledged: int = 0
    ready_s: list[float] = field(default_factory=list)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def push_on(self, stopped: threading.Event, first: int) -> None:
        """Push until stopped, each version with other weights than the last."""
        due_s = time.monotonic()
        for number in itertools.count(first):
            if stopped.wait(max(0.0, due_s - time.monotonic())):
                return
            due_s = max(due_s + EVERY_S, time.monotonic())
            self._push(number)

    def ask_on(self, stopped: threading.Event) -> None:
        """Sample from prod until stopped; compare each answer with the reference."""
        for prompt in itertools.cycle(PROMPTS):
            if stopped.is_set():
                return
            if not self.acknowledged:
                time.sleep(0.05)
                continue
            oldest = self.acknowledged - 1
            (choice,) = self._sample(f"{self.name}/policy", prompt)
            if choice.digest not in self.order[oldest:]:
                self.wrong.append(f"prod was {choice.digest}, older than {self.order[oldest]}")

    def _push(self, number: int) -> None:
        seed = SEEDS[number % len(SEEDS)]
        durable = number % DURABLE_EVERY == 0
        folder = write_adapter(self.folder, seed, number)
        digest = digest_of(folder)
        self.seeds[digest] = seed
        self.order.append(digest)
        began_s = time.monotonic()
        version = self.client.push(
            folder,
            "policy",
            alias="prod",
            lifetime_s=None if durable else 600,
            keep=None if durable else 2,
        )
        self.ready_s.append(time.monotonic() - began_s)
        self.acknowledged = len(self.order)
        assert version.digest == digest
        (choice,) = self._sample(version, PROMPTS[0])
        if choice.digest != digest:
            self.wrong.append(f"{choice.digest} answered for {digest}")

    def _sample(self, model: PushResult | str, prompt: str) -> list[SampledChoice]:
        choices = self.client.sample(model, prompt, max_tokens=TOKENS, temperature=0)
        for choice in choices:
            self.answers += 1
            seed = self.seeds[choice.digest or ""]
            want = self.reference.logprobs(seed, choice.prompt_ids, choice.token_ids)
            off = float(np.abs(want - np.array(choice.logprobs)).max())
            if not off < NEAR:
                self.wrong.append(f"tokens of {choice.digest} are {off:.3f} off")
        return choices


class Footprint:
    """Resources of the service's processes and of its cache over time.

    The gateway is measured without its log of requests, which keeps an hour and grows until
    then.
    """

    def __init__(self, service: Service, cache: Path) -> None:
        self._service, self._cache = service, cache
        self._processes = list(_processes())
        self.seen: dict[str, list[int]] = defaultdict(list)
        self.disk: list[int] = []
        self.bodies: list[int] = []  # from the gateway

    def look(self) -> None:
        log_bytes = self._request_log_bytes()
        for name, process in self._processes:
            held = log_bytes if name.startswith("gateway") else 0
            self.seen[f"{name}: memory"].append(process.memory_info().rss - held)
            self.seen[f"{name}: open files"].append(process.num_fds())
        walked = os.walk(self._cache / "pushes")  # glob raises if a folder disappears meanwhile
        self.bodies.append(sum(_size(Path(at, name)) for at, _, names in walked for name in names))
        self.disk.append(sum(map(_size, self._cache.iterdir())))

    def _request_log_bytes(self) -> int:
        headers = {"Authorization": f"Bearer {self._service.admin_key}"}
        page = httpx.get(f"{self._service.admin_url}/metrics", headers=headers, timeout=60)
        page.raise_for_status()
        return int(Scraped(page.text).total("lorikeet_request_log_bytes"))

    def grown(self) -> list[str]:
        """Names of sizes that grew from the second quarter of the run to the last."""
        found = []
        for name, sizes in self.seen.items():
            quarter = len(sizes) // 4
            early = statistics.fmean(sizes[quarter : 2 * quarter])
            late = statistics.fmean(sizes[-quarter:])
            few = FEW_FILES + (STORE_CONNECTIONS if name.startswith("controller") else 0)
            if late > GROWTH * early + few:
                found.append(f"{name}: {early:,.0f} to {late:,.0f}")
        return found


def test_a_long_run_of_pushes_gives_no_wrong_token_and_no_growth(
    soaked: tuple[Service, Path], tmp_path: Path
) -> None:
    service, cache = soaked
    reference, stopped = Reference(SEEDS), threading.Event()
    tenants = [make_tenant(service, number, tmp_path, reference) for number in range(TENANTS)]
    with ThreadPoolExecutor(2 * TENANTS) as threads:
        working = [
            *(threads.submit(each.push_on, stopped, n) for n, each in enumerate(tenants)),
            *(threads.submit(each.ask_on, stopped) for each in tenants),
        ]
        footprint, until_s = Footprint(service, cache), time.monotonic() + SECONDS
        try:
            while time.monotonic() < until_s and not any(each.done() for each in working):
                footprint.look()
                time.sleep(LOOK_S)
        finally:
            stopped.set()
        for each in working:
            each.result()
    ready_s = [took_s for tenant in tenants for took_s in tenant.ready_s]
    p50, p99 = np.percentile(ready_s, (50, 99))
    answers = sum(tenant.answers for tenant in tenants)
    print(f"{len(ready_s)} pushes, ready after p50 {p50:.2f} s, p99 {p99:.2f} s; {answers} answers")
    for name, sizes in footprint.seen.items():
        every = max(1, len(sizes) // 8)
        print(f"{name}: {', '.join(f'{size:,}' for size in sizes[::every])}")
    grown = footprint.grown()
    print(f"grown: {grown}; disk: most {max(footprint.disk):,}")
    print(f"bodies: most {max(footprint.bodies):,}")
    assert [wrong for tenant in tenants for wrong in tenant.wrong] == []
    assert all(tenant.answers > len(tenant.order) for tenant in tenants)
    assert max(footprint.disk) < 1.25 * DISK_BYTES
    assert max(footprint.bodies) < DISK_BYTES  # sixteen versions of each tenant
    if SECONDS >= STEADY_RUN_S:
        assert grown == []


def make_tenant(service: Service, number: int, folder: Path, reference: Reference) -> Tenant:
    name = f"soak-{number}"
    service.admin("POST", "/tenants", json={"tenant": name}).raise_for_status()
    keys = []
    for wanted in ({}, {"scopes": ["publish"], "adapters": ["policy"]}):
        made = service.admin("POST", f"/tenants/{name}/keys", json=wanted).raise_for_status()
        keys.append(made.json()["key"])
    return Tenant(name, Client(service.url, *keys), folder / name, reference)


def digest_of(folder: Path) -> str:
    """Digest that a push of the PEFT folder gets."""
    blob = folder / "blob"
    digest = write_blob(folder, blob)
    blob.unlink()
    return digest


def _processes() -> Iterator[tuple[str, psutil.Process]]:
    """Processes of the service's gateway, replicas and engines, with their roles."""
    for process in psutil.process_iter():
        title = _title(process)
        if f"ServeReplica:{APPLICATION}:" not in title:
            continue
        yield f"{title.rpartition(':')[2].strip()} {process.pid}", process
        for child in process.children():
            if "lorikeet_engine.process.server" in _title(child):
                yield f"engine process {child.pid}", child


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the file has just been deleted
        return 0
