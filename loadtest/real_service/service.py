"""Runs the service as `serve run serve_app:app` does, on ports of its own."""

import os
import runpy
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import ray
import torch
from ray import serve
from ray.serve.deployment import Application

from loadtest.ports import free_port

ROOT = Path(__file__).parents[2]
PROXIES = {"Serve's proxy": "0", "HAProxy": "1"}
_SETTLING_S = 4.0  # HAProxy begins anew, dropping connections, when an application comes
_NICENESS = "RAY_worker_niceness"
_ENVIRONMENT = {  # as the Makefile's
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "lorikeet.serving.proxy_middleware:middlewares",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**27),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # nobody else waits for it
    _NICENESS: os.environ.get(_NICENESS, "0"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # A virtual machine's memory may grow as it is used: what is said to be free tells Ray nothing.
    "RAY_memory_monitor_refresh_ms": "0",
}
_PARTS = {  # by what is in a process's command line
    "lorikeet_engine.process.server": "engines",
    "engine-": "replicas",
    "gateway": "gateways",
    "haproxy": "HAProxy",
    "Proxy": "Serve's proxy",
}
_RESIDENT_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """Where the service is. url: the public listener, admin_url: the admin listener."""

    url: str
    admin_url: str

    def replicas(self, admin_key: str) -> list[dict[str, Any]]:
        """What every replica holds and does. Raises httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {admin_key}"}
        answer = httpx.get(f"{self.admin_url}/admin/v1/status", headers=headers, timeout=30)
        found: list[dict[str, Any]] = answer.raise_for_status().json()["replicas"]
        return found

    def wait_until_resident(self, admin_key: str, adapters: int, replicas: int) -> None:
        """Wait until N adapters are on the GPU of each of N replicas. Raises TimeoutError."""
        deadline = time.monotonic() + _RESIDENT_WITHIN_S
        while time.monotonic() < deadline:
            held = [
                sum(adapter["residency"] == "gpu" for adapter in replica["adapters"])
                for replica in self.replicas(admin_key)
            ]
            if len(held) == replicas and min(held) >= adapters:
                return
            time.sleep(0.5)
        raise TimeoutError(f"{held} adapters are on GPUs: want {adapters} on {replicas}")


def served_app() -> Application:
    """The application that `serve run serve_app:app` runs."""
    app: Application = runpy.run_path(str(ROOT / "serve_app.py"))["app"]
    return app


@contextmanager
def service(
    variables: Mapping[str, str],
    proxy: str = "HAProxy",
    compose: Callable[[], Application] = served_app,
) -> Iterator[RunningService]:
    """Run it until the end of the block. variables: LORIKEET_…; proxy: a name in PROXIES.

    compose: makes the application, in the service's environment. Raises RuntimeError when it does
    not start; its processes' logs tell why.
    """
    public, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    host, port = public.split(":")
    with tempfile.TemporaryDirectory(prefix="haproxy-") as folder:
        environment = {
            **_ENVIRONMENT,
            **variables,
            **_haproxy(Path(folder)),
            "RAY_SERVE_ENABLE_HA_PROXY": PROXIES[proxy],
            "LORIKEET_ADMIN_ADDRESS": admin,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with _environment(environment), _cluster():
            serve.start(http_options={"host": host, "port": int(port)})
            serve.run(compose())
            if proxy == "HAProxy":
                time.sleep(_SETTLING_S)
            yield RunningService(f"http://{public}", f"http://{admin}")


class CpuUsage:
    """A `with` block, and the CPU time that the service's processes spent in it, by what they are.

    Those that end within the block are left out.
    """

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._before = _spent_s()
        return self

    def __exit__(self, *_: object) -> None:
        for pid, (part, spent_s) in _spent_s().items():
            self._spent[part] += spent_s - self._before.get(pid, (part, 0.0))[1]

    def used(self, seconds: float) -> dict[str, float]:
        """Cores used on average over `seconds`, by process."""
        return {part: round(spent_s / seconds, 2) for part, spent_s in self._spent.items()}


def parts_of_processes() -> dict[int, str]:
    """What each process is that the service has started, by its id."""
    parts = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            parts[process.pid] = _part(" ".join(process.cmdline()))
    return parts


def _spent_s() -> dict[int, tuple[str, float]]:
    """For each process what it is, and its CPU seconds so far."""
    spent = {}
    for pid, part in parts_of_processes().items():
        with suppress(psutil.Error):  # it has just ended
            times = psutil.Process(pid).cpu_times()
            spent[pid] = part, times.user + times.system
    return spent


def _part(title: str) -> str:
    return next((part for key, part in _PARTS.items() if key in title), "the rest")


@contextmanager
def _cluster() -> Iterator[None]:
    ray.init(
        "local",
        num_cpus=4,  # shares of these, which bind nobody
        num_gpus=torch.cuda.device_count(),
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
    )
    try:
        yield
    finally:  # at once: stopping in good order takes half a minute
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                if process.name() == "haproxy":  # Ray's workers end with Ray
                    process.terminate()


def _haproxy(folder: Path) -> dict[str, str]:
    """Its files and ports, which are fixed otherwise."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(8, os.cpu_count() or 1)),
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables, and of LORIKEET_ none but these, until the end of the block."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("LORIKEET_")]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
