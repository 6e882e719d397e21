"""What a scrape of a large service weighs and takes: 1,000 tenants, 100,000 adapters."""

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.api.metrics import KEPT_S
from lorikeet.api.peers import Peers, Poll
from lorikeet.metrics.busiest import MORE
from lorikeet.metrics.ended import OUTCOMES, Ended
from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.metrics.page import Page, render
from lorikeet.metrics.replica import replica_metrics
from lorikeet_engine.counts import LOAD_S, Distribution
from tests.api.conftest import Gateway, serving
from tests.metrics.given import engine_counts
from tests.metrics.scraping import Scraped, check_with_promtool

GATEWAYS, REPLICAS, TENANTS, ADAPTERS = 2, 8, 1_000, 100_000
RESIDENCIES = ("gpu", "host", "disk", "remote", "none")
FULL = Distribution(LOAD_S, (1_234_567,) * (len(LOAD_S) + 1), 1_234_567.890123)


class Second(Peers):
    """The other gateway, as busy as the first."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page

    async def poll(self, question: str, *arguments: Any) -> Poll:
        return Poll((self.page,) if question == "metrics" else (), 0)


def requests() -> Iterable[Ended]:
    """Every tenant's, of every outcome, residency and adapter."""
    endings = itertools.cycle(itertools.product(RESIDENCIES, OUTCOMES))
    for n, (residency, outcome) in zip(range(ADAPTERS), endings, strict=False):
        tenant = f"tenant-of-some-length-{(n // 4) % TENANTS:04d}"
        adapter = None if residency == "none" else f"{tenant}/adapter-{n:06d}"
        code = f"code_{n % 17}" if outcome in ("refused", "failed") else None
        tokens = (1_234_567, 123_456, 12_345) if outcome == "finished" else None
        base_model = ("llama-3.1-8b-instruct", "qwen3-0.6b")[n % 2]
        yield Ended(
            outcome, tenant, base_model, adapter, residency, code, 0.1, 0.01, 1.5, n % 2, tokens
        )


def filled() -> GatewayMetrics:
    metrics = GatewayMetrics(GATEWAYS)
    for request in requests():
        metrics.ended(request)
    return metrics


def timed(gateway: Gateway) -> tuple[float, bytes]:
    """A scrape's processor time in this process, gateway and client alike, and its page."""
    began_s = time.process_time()
    answer = gateway.request("GET", "/metrics", gateway.admin_key)
    took_s = time.process_time() - began_s
    assert answer.status_code == httpx.codes.OK
    return took_s, answer.content


def test_a_scrape_of_a_large_service_is_small_and_quick(tmp_path: Path) -> None:
    counts = engine_counts(FULL, FULL)
    replicas = [
        render(replica_metrics(counts), {"base_model": "llama-3.1-8b-instruct", "replica": name})
        for name in (f"replica{n}" for n in range(REPLICAS))
    ]

    async def pages() -> Sequence[Page]:
        return replicas

    metrics = filled()
    second = Second(render(metrics.collect(), {"gateway": "second00"}))
    with serving(tmp_path, peers=second, pages=pages, metrics=metrics, name="first000") as gateway:
        first = timed(gateway)
        time.sleep(KEPT_S)  # until the first page is no longer good
        took_s, page = min(first, timed(gateway))
    assert len(page) < 2e6
    assert took_s < 0.1
    scraped = Scraped(page.decode())
    tenants = scraped.labels("lorikeet_tenant_requests_total", "tenant")
    assert len(tenants) == TENANTS
    assert len(scraped.labels("lorikeet_adapter_requests_total", "adapter")) == 101
    assert scraped.total("lorikeet_adapter_requests_total") == GATEWAYS * 0.8 * ADAPTERS
    assert scraped.total("lorikeet_tenant_requests_total") == GATEWAYS * ADAPTERS
    check_with_promtool(page)


@pytest.mark.parametrize("gateways", [1, 3])
def test_rays_exporter_can_show_all_series_that_the_gateways_of_a_node_have(gateways: int) -> None:
    metrics = GatewayMetrics(gateways)
    for n, outcome in itertools.product(range(TENANTS), OUTCOMES):
        tenant, tokens = f"t{n}", (1, 2, 3) if outcome == "finished" else None
        metrics.ended(Ended(outcome, tenant, "tiny", f"{tenant}/a", "gpu", tokens=tokens))
    counted = {metric.name: len(metric.samples) for metric in metrics.collect_for_ray()}
    assert 1_500 <= gateways * counted["lorikeet_tenant_requests"] <= 2_000 / MORE
    assert gateways * max(counted.values()) <= 2_000 / MORE
    (requests,) = (m for m in metrics.collect_for_ray() if m.name == "lorikeet_tenant_requests")
    assert sum(sample.value for sample in requests.samples) == TENANTS * len(OUTCOMES)
