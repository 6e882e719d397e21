"""Runs the service as `serve run serve_app:app` does, on ports of its own."""

import runpy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import httpx
import psutil
from ray import serve
from ray.serve.deployment import Application

from loadtest.cluster import ROOT, cluster, settle
from loadtest.ports import free_port

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
    admin = f"127.0.0.1:{free_port()}"
    with cluster(proxy, {**variables, "LORIKEET_ADMIN_ADDRESS": admin}) as url:
        serve.run(compose())
        settle(proxy)
        yield RunningService(url, f"http://{admin}")


class CpuUsage:
    """A `with` block, and the CPU time that the service's processes spent in it, by what they are.

    Those that end within the block are left out.
    """

    def __init__(self) -> None:
        self._spent = defaultdict[str, float](float)

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
