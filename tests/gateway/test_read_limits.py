"""Limits of a tenant's requests that generate nothing, over HTTP."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from lorikeet.apis.errors import TINKER
from lorikeet.catalog.records import Scope
from lorikeet.gateway.app import create_app
from lorikeet.gateway.routes import usage as usage_routes
from lorikeet.gateway.services import ServedModel, Services
from lorikeet.gateway.tinker.requests import RETRIEVE, TRAINING, sampling_session_id
from lorikeet.gateway.vllm.requests import DETOKENIZE, GENERATE, LOAD, PATHS, TOKENIZE, UNLOAD
from lorikeet.tenancy import read_limiter
from lorikeet.usage.reader import UsageReader
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, ReplayEngines, chat
from tests.gateway.test_bad_requests import error_of

DAYS_400 = "/v1/usage?from=2025-01-01&to=2026-02-04&by=day,adapter"
COUNT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PARAMS = {
    "model": "tiny",
    "request_id": "0" * 32,
    "response_id": "resp_0",
    "name": "support",
    "file_id": "file-" + "0" * 24,
    "batch_id": "batch_" + "0" * 24,
    "session_id": "0" * 32,
    "sampler_id": sampling_session_id("tiny"),
}
BURST = 20
INFERRING = {TOKENIZE, DETOKENIZE, GENERATE}
CHEAP = {RETRIEVE: 8}
"""More than the number of requests that count as one read, by paths where it is not one."""


@pytest.fixture
def few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts of BURST reads, and hardly any after them."""
    monkeypatch.setattr(read_limiter, "READS_PER_MIN", BURST)
    monkeypatch.setattr(read_limiter, "BURST_S", 60.0)


def tenant_routes(gateway: Gateway) -> list[tuple[str, str]]:
    """Return method and path of each route that a tenant reaches."""
    parts = gateway.catalog, {"tiny": ServedModel(SHAPE)}, LIMITS, ReplayEngines()
    services = Services(*parts, load_from=gateway.folder, tinker=True)
    routes = [each for each in create_app(services).routes if isinstance(each, Route | APIRoute)]
    return [
        (method, route.path)
        for route in routes
        if route.path.startswith(("/v1/", TINKER)) or route.path in PATHS
        if route.path not in TRAINING[1:]  # as the first
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


@pytest.mark.usefixtures("few_reads")
def test_every_route_of_a_tenant_has_a_rate(unchanged: Gateway) -> None:
    gateway = unchanged
    walked = tenant_routes(gateway)
    assert {"/v1/usage", "/v1/models", "/v1/openapi.json"} <= {path for _, path in walked}
    assert {LOAD, *PATHS} <= {path for _, path in walked}
    for number, (method, path) in enumerate(walked):
        tenant = f"t{number}"
        gateway.catalog.create_tenant(tenant, actor="test", requests_per_min=BURST, burst_s=60.0)
        publishes = path.startswith("/v1/adapters") or path in {LOAD, UNLOAD, *PATHS} - INFERRING
        scopes, adapters = ({Scope.PUBLISH}, ("*",)) if publishes else ({Scope.INFER}, ())
        _, key = gateway.catalog.create_key(tenant, scopes, adapters=adapters, actor="test")
        url = path.replace("{model:path}", "{model}").format(**PARAMS, digest="0" * 64)
        statuses = [
            gateway.request(method, url, key, json=COUNT if method == "POST" else None).status_code
            for _ in range(CHEAP.get(path, 1) * BURST + 1)
        ]
        assert 429 in statuses, (method, path, statuses)
        assert statuses[0] != 429, (method, path, statuses)


@pytest.mark.usefixtures("few_reads")
def test_reads_take_nothing_from_generations_nor_from_other_tenants(gateway: Gateway) -> None:
    gateway.catalog.create_tenant("few", actor="test", requests_per_min=BURST, burst_s=60.0)
    _, key = gateway.catalog.create_key("few", {Scope.INFER}, actor="test")
    for _ in range(BURST):
        assert gateway.request("GET", "/v1/models", key).status_code == 200
    refused = gateway.request("GET", "/v1/openapi.json", key)
    assert "reads per minute" in error_of(refused, 429)["message"]
    assert int(refused.headers["retry-after"]) >= 1
    answer = gateway.request("POST", "/v1/chat/completions", key, json=chat("tiny", "hello"))
    assert answer.status_code == 200
    other = gateway.request("GET", "/v1/models", gateway.keys["globex"])
    assert other.status_code == 200


def test_a_long_period_of_usage_counts_by_its_days(gateway: Gateway) -> None:
    key = gateway.keys["acme"]
    statuses = [gateway.request("GET", DAYS_400, key).status_code for _ in range(8)]
    assert (statuses[:2], statuses[-1]) == ([200, 200], 429)
    assert gateway.request("GET", "/v1/usage", gateway.keys["globex"]).status_code == 200


def test_a_large_body_whose_tokens_are_counted_counts_by_its_size(gateway: Gateway) -> None:
    body = json.dumps(COUNT).encode().ljust(2 * 2**20)
    key, path = gateway.keys["acme"], "/v1/messages/count_tokens"
    statuses = [gateway.request("POST", path, key, content=body).status_code for _ in range(6)]
    assert (statuses[:2], statuses[-1]) == ([200, 200], 429)


def test_a_tenants_reports_leave_a_thread_to_others(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, read = threading.Event(), UsageReader.read

    def slow(self: UsageReader, *period: Any) -> Any:
        if period[0].year == 2026 and period[0].month == 1:
            going.wait(10)
        return read(self, *period)

    monkeypatch.setattr(UsageReader, "read", slow)

    def ask(tenant: str, first: str) -> httpx.Response:
        path = f"/v1/usage?from={first}&to={first}"
        return gateway.request("GET", path, gateway.keys[tenant])

    with ThreadPoolExecutor(usage_routes._AT_ONCE + 1) as clients:
        stuck = [clients.submit(ask, "acme", "2026-01-01") for _ in range(usage_routes._AT_ONCE)]
        time.sleep(0.2)
        began = time.monotonic()
        assert ask("globex", "2026-02-01").status_code == 200
        assert time.monotonic() - began < 5
        going.set()
        assert [each.result().status_code for each in stuck] == [200] * usage_routes._AT_ONCE
