"""One real service for all end-to-end tests: Ray, HTTP, the demo model, a catalog on S3."""

import contextlib
import itertools
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from demo.fill_catalog import ADAPTERS
from lorikeet_engine.adapter_format import write_blob
from tests.e2e import faulty_replica
from tests.e2e.cuttable_store import StoreLink
from tests.e2e.load import Target
from tests.gateway.collector import Collector, collecting

ROOT = Path(__file__).parents[2]
REPLICAS = 3
USAGE_FLUSH_S = 0.5
LARGEST_MESSAGE = 2**20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run end-to-end tests last, as their shared service runs until the end of the session."""
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


@dataclass(frozen=True)
class Service:
    """A running service and its keys.

    url: listener for tenants.
    admin_url: listener for admins.
    load_from: folder with each tenant's folder of adapters to load.
    """

    url: str
    admin_url: str
    catalog: str
    admin_key: str
    tenant_keys: dict[str, str]
    load_from: Path

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.tenant_keys[tenant], max_retries=0, timeout=60
        )

    def admin(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.admin_url}/admin/v1{path}",
            headers={"Authorization": f"Bearer {self.admin_key}"},
            timeout=30,
            **options,
        )

    def replicas(self) -> list[dict[str, Any]]:
        return self.admin("GET", "/status").raise_for_status().json()["replicas"]

    def holders(self, adapter: str, residency: str = "gpu") -> set[str]:
        return {
            replica["replica"]
            for replica in self.replicas()
            for held in replica["adapters"]
            if held["adapter"] == adapter and held["residency"] == residency
        }


@pytest.fixture(scope="session")
def store_link(s3_bucket: str) -> Iterator[StoreLink]:
    link = StoreLink(os.environ["AWS_ENDPOINT_URL_S3"])
    yield link
    link.close()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Trace collector that the service exports requests to."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    s3_bucket: str,
    store_link: StoreLink,
    collector: Collector,
) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as environ:
        root = tmp_path_factory.mktemp("service")
        environ.setenv("AWS_ENDPOINT_URL_S3", store_link.url)
        environ.setenv("LORIKEET_CATALOG", f"{s3_bucket}/e2e")
        environ.setenv("LORIKEET_CACHE_DIR", str(root / "cache"))
        environ.setenv("LORIKEET_REPLICAS", str(REPLICAS))
        environ.setenv("LORIKEET_ADMIN_ADDRESS", f"127.0.0.1:{free_port()}")
        environ.setenv("LORIKEET_USAGE_FLUSH_S", str(USAGE_FLUSH_S))
        environ.setenv("LORIKEET_LOAD_FROM", str(root / "shared"))
        environ.setenv("LORIKEET_TINKER", "true")
        environ.setenv("LORIKEET_FILES_BYTES", str(100 * 2**20))
        environ.setenv("LORIKEET_OTLP_TRACES_ENDPOINT", collector.url)
        environ.setenv("LORIKEET_TRACES_SAMPLING_RATIO", "0")
        environ.setenv(faulty_replica.FOLDER, str(tmp_path_factory.mktemp("faults")))
        environ.setattr("lorikeet.serving.deployments.EngineReplica", faulty_replica.FaultyReplica)
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ.setenv("PYTHONPATH", os.pathsep.join(paths))  # for the actors, too
        # small, so that an answer that is quick to make exceeds Serve's gRPC limit
        environ.setenv("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(LARGEST_MESSAGE))
        environ.setenv("RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE", "1")  # for test_privacy
        environ.chdir(ROOT)
        yield from run_service(root)


def run_service(root: Path) -> Iterator[Service]:
    """Run the demo with the settings of the environment; keep its keys below `root`."""
    import ray
    from ray import serve

    import serve_app
    from demo.fill_catalog import fill_catalog
    from lorikeet.settings import Settings

    settings = Settings.from_env()
    keys = fill_catalog(settings, root / "keys")
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(serve_app.app)
        yield Service(
            f"http://127.0.0.1:{port}",
            f"http://{settings.admin_address}",
            settings.catalog,
            keys.admin,
            keys.tenants,
            root / "shared",
        )
    finally:
        ray.shutdown()  # kill: an orderly stop takes half a minute and is tested with the demo


def free_port() -> int:
    """Return a free port outside the kernel's ephemeral range.

    Ray's processes take many ephemeral ports while the service starts.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port in a hundred")


@pytest.fixture(scope="session")
def crowd(service: Service, tmp_path_factory: pytest.TempPathFactory) -> "Crowd":
    return Crowd(service, tmp_path_factory.mktemp("crowd") / "peft")


class Crowd:
    """Tenant that registers adapters that no replica has seen, each with its own weights."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        tenant = {"tenant": "crowd"}
        service.admin("POST", "/tenants", json=tenant).raise_for_status()
        made = service.admin("POST", "/tenants/crowd/keys", json={}).raise_for_status()
        self._key = made.json()["key"]
        self._folder = shutil.copytree(ADAPTERS / "quillon" / "reverse", folder)
        self._config = json.loads((folder / "adapter_config.json").read_text())
        self._alphas = itertools.count(self._config["lora_alpha"] + 1)

    def base(self) -> Target:
        return Target("lorikeet-demo", self._key)

    def unregistered(self) -> Target:
        """Return an adapter that is not registered."""
        return Target("crowd/unregistered", self._key)

    def adapters(self, count: int) -> list[Target]:
        return [self._register(next(self._alphas)) for _ in range(count)]

    def _register(self, alpha: int) -> Target:
        config, blob = self._folder / "adapter_config.json", self._folder / "blob"
        config.write_text(json.dumps(self._config | {"lora_alpha": alpha}))
        write_blob(self._folder, blob)
        path = f"/adapters/crowd/alpha-{alpha}/versions"
        self._service.admin("PUT", path, content=blob.read_bytes()).raise_for_status()
        return Target(f"crowd/alpha-{alpha}", self._key)
