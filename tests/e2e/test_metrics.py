"""Metrics of the running service, compared with the requests that were sent."""

import time

import httpx

from lorikeet.gateway.routes.metrics import FRESH_S
from tests.e2e.conftest import REPLICAS, Crowd, Service
from tests.e2e.faulty_replica import faults
from tests.e2e.service_processes import complete
from tests.metrics.scraping import Scraped, check_with_promtool


def read(service: Service) -> bytes:
    headers = {"Authorization": f"Bearer {service.admin_key}"}
    answer = httpx.get(f"{service.admin_url}/metrics", headers=headers, timeout=30)
    return answer.raise_for_status().content


def scrape(service: Service) -> Scraped:
    return Scraped(read(service).decode())


def generate(service: Service, key: str, model: str, **body: object) -> dict[str, int]:
    answer = httpx.post(
        f"{service.url}/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": model, "prompt": "once upon a time", "max_tokens": 8, **body},
        timeout=60,
    )
    usage: dict[str, int] = answer.raise_for_status().json()["usage"]
    return usage


def test_the_metrics_page_agrees_with_the_requests_sent(service: Service, crowd: Crowd) -> None:
    assert complete(service)
    (target,) = crowd.adapters(1)
    before = scrape(service)
    usages = [generate(service, target.key, target.model, n=2, ignore_eos=True) for _ in range(3)]
    usages.append(generate(service, target.key, crowd.base().model, ignore_eos=True))
    time.sleep(FRESH_S)  # the service caches a page for this long
    page = read(service)
    check_with_promtool(page)
    after = Scraped(page.decode())

    def more(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    output = sum(usage["completion_tokens"] for usage in usages)
    assert output == 3 * 2 * 8 + 8
    assert more("lorikeet_requests_total", outcome="finished", base_model="lorikeet-demo") == 4
    assert more("lorikeet_tenant_tokens_total", tenant="crowd", kind="output") == output
    assert more("lorikeet_adapter_requests_total", adapter=target.model) == 3
    assert more("lorikeet_tokens_total", kind="output") == output
    assert more("lorikeet_adapter_lookups_total") == 3
    assert more("lorikeet_adapter_lookups_total", residency="remote") == 1
    assert more("lorikeet_adapter_loads_total", source="remote") >= 1
    assert more("lorikeet_inter_token_latency_seconds_count", residency="none") == 7
    assert more("lorikeet_step_seconds_count") > 0
    assert len(after.labels("lorikeet_adapters", "replica")) == REPLICAS
    assert after.total("lorikeet_replicas", base_model="lorikeet-demo", state="desired") == REPLICAS
    assert after.labels("lorikeet_pins", "state") == {"met", "loading", "unmet"}


def test_a_replica_whose_metrics_hang_is_left_out(service: Service) -> None:
    assert complete(service)
    with faults(metrics="hang"):
        time.sleep(FRESH_S)
        page = scrape(service)
        assert "lorikeet_adapters" not in page.names
        assert {"lorikeet_requests_total", "lorikeet_pins"} <= page.names
    time.sleep(FRESH_S)
    assert len(scrape(service).labels("lorikeet_adapters", "replica")) == REPLICAS
