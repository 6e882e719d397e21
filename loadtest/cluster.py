"""Ray and Serve on this machine, with the Makefile's environment, on free ports."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
import torch
from ray import serve

from loadtest.ports import free_port

ROOT = Path(__file__).parents[1]
PROXIES = {"Serve's proxy": "0", "HAProxy": "1"}
_SETTLING_S = 4.0
_NICENESS = "RAY_worker_niceness"
_PACKAGES = [str(ROOT / part) for part in (".", "platform", "engine")]
_ENVIRONMENT = {  # equal to the Makefile's
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "lorikeet.serving.proxy_middleware:middlewares",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**27),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # no load balancer has to notice
    _NICENESS: os.environ.get(_NICENESS, "0"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # A virtual machine's memory may grow with use, so its free memory tells Ray nothing.
    "RAY_memory_monitor_refresh_ms": "0",
}


@contextmanager
def cluster(
    proxy: str = "Serve's proxy", variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run Ray and Serve until the end of the block; yield the URL of their proxy.

    proxy: a name in PROXIES.
    variables: further environment variables; LORIKEET_ variables of the caller's environment are
        removed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="haproxy-") as folder:
        haproxy = _haproxy(Path(folder)) | {"RAY_SERVE_ENABLE_HA_PROXY": PROXIES[proxy]}
        # The existing path may be where Ray itself is found.
        path = os.pathsep.join([*_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {**_ENVIRONMENT, "PYTHONPATH": path, **haproxy, **(variables or {})}
        with _environment(own), _ray():
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"


def settle(proxy: str) -> None:
    """Wait after a deployment until HAProxy has reloaded and drops no connection.

    proxy: a name in PROXIES.
    """
    if proxy == "HAProxy":
        time.sleep(_SETTLING_S)


@contextmanager
def _ray() -> Iterator[None]:
    ray.init(
        "local",
        num_cpus=4,  # for the fractions that actors request; no CPU is bound
        num_gpus=torch.cuda.device_count(),
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
    )
    try:
        yield
    finally:  # at once: an orderly stop takes half a minute
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                if process.name() == "haproxy":  # Ray's workers end with Ray
                    process.terminate()


def _haproxy(folder: Path) -> dict[str, str]:
    """Return environment variables that give HAProxy its own files and free ports, instead of fixed
    ones.

    folder: folder for the files.
    """
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
    """Set these variables, and no other LORIKEET_ variable, until the end of the block."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("LORIKEET_")]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
