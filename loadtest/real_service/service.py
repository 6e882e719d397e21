"""The service as `serve run serve_app:app` runs it, on free ports."""

import runpy
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import httpx
import psutil
from ray import serve
from ray.serve.deployment import Application

from loadtest.cluster import ROOT, cluster, settle
from loadtest.ports import free_port

_PARTS = {  # part of a process's command line → kind of process
    "lorikeet_engine.process.server": "engines",
    "engine-": "replicas",
    "gateway": "gateways",
    "haproxy": "HAProxy",
    "Proxy": "Serve's proxy",
}
_RESIDENT_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """Addresses of a running service.

    url: public listener.
    admin_url: admin listener.
    """

    url: str
    admin_url: str

    def replicas(self, admin_key: str) -> list[dict[str, Any]]:
        """Fetch the status of every replica. Raises httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {admin_key}"}
        answer = httpx.get(f"{self.admin_url}/admin/v1/status", headers=headers, timeout=30)
        found: list[dict[str, Any]] = answer.raise_for_status().json()["replicas"]
        return found

    def wait_until_resident(self, admin_key: str, adapters: int, replicas: int) -> None:
        """Wait until enough adapters are on the GPU of every replica.

        adapters: number of adapters that each replica must hold.
        replicas: expected number of replicas.
        Raises TimeoutError.
        """
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
    """Return the application that `serve run serve_app:app` runs."""
    app: Application = runpy.run_path(str(ROOT / "serve_app.py"))["app"]
    return app


@contextmanager
def service(variables: Mapping[str, str], proxy: str = "HAProxy") -> Iterator[RunningService]:
    """Run the service until the end of the block.

    variables: LORIKEET_ variables.
    proxy: a name in PROXIES.
    Raises RuntimeError if the service does not start; the logs of its processes have the cause.
    """
    admin = f"127.0.0.1:{free_port()}"
    with cluster(proxy, {**variables, "LORIKEET_ADMIN_ADDRESS": admin}) as url:
        serve.run(served_app())
        settle(proxy)
        yield RunningService(url, f"http://{admin}")


class CpuUsage:
    """`with` block that measures CPU time of the service's processes, by kind of process.

    Processes that end within the block are not counted.
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
        """Return the mean number of used cores over `seconds`, by kind of process."""
        return {part: round(spent_s / seconds, 2) for part, spent_s in self._spent.items()}


def parts_of_processes() -> dict[int, str]:
    """Return the kind of each process that the service has started, by process id."""
    parts = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process has just ended
            parts[process.pid] = _part(" ".join(process.cmdline()))
    return parts


def _spent_s() -> dict[int, tuple[str, float]]:
    """Return the kind and CPU seconds of each process, by process id."""
    spent = {}
    for pid, part in parts_of_processes().items():
        with suppress(psutil.Error):  # the process has just ended
            times = psutil.Process(pid).cpu_times()
            spent[pid] = part, times.user + times.system
    return spent


def _part(title: str) -> str:
    return next((part for key, part in _PARTS.items() if key in title), "the rest")
