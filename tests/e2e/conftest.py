"""One real service for all end-to-end tests: Ray, HTTP, the demo model, a catalog on S3."""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
REPLICAS = 3


@dataclass(frozen=True)
class Service:
    """A running service and the keys to it."""

    url: str
    catalog: str
    admin_key: str
    tenant_keys: dict[str, str]

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.tenant_keys[tenant], max_retries=0, timeout=60
        )

    def admin(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.url}/admin/v1{path}",
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
def service(tmp_path_factory: pytest.TempPathFactory, s3_bucket: str) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as environ:
        root = tmp_path_factory.mktemp("service")
        environ.setenv("LORIKEET_CATALOG", f"{s3_bucket}/e2e")
        environ.setenv("LORIKEET_CACHE_DIR", str(root / "cache"))
        environ.setenv("LORIKEET_REPLICAS", str(REPLICAS))
        environ.setenv("PYTHONPATH", str(ROOT))
        environ.chdir(ROOT)
        yield from _run(root)


def _run(root: Path) -> Iterator[Service]:
    import ray
    from ray import serve

    import serve_app
    from demo.fill import fill_catalog
    from lorikeet.settings import Settings

    settings = Settings.from_env()
    keys = fill_catalog(settings, root / "keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(serve_app.app)
        yield Service(f"http://127.0.0.1:{port}", settings.catalog, keys.admin, keys.tenants)
    finally:
        serve.shutdown()
        ray.shutdown()


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether `holds` becomes true in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return False
