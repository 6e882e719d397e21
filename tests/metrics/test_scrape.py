"""GET /metrics over the API: access, and numbers that match the requests."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily

from lorikeet.catalog.records import Scope
from lorikeet.errors import Unavailable
from lorikeet.gateway.routes.metrics import FRESH_S
from lorikeet.metrics.exposition import render
from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.protocol.messages import AnswerHeader, Attempt, Call, FinalUsage, Refusal
from lorikeet.protocol.peers import Peers, Poll
from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import DraftCounts, DraftSource, EngineTimings
from tests.gateway.conftest import Gateway, Items, chat, endless, repeat, serving
from tests.metrics.scraping import Scraped, check_with_promtool
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
DRAFTS = (DraftCounts(DraftSource.LOOKUP, 20, 13), DraftCounts(DraftSource.ANSWERS, 6, 5))
COURSE = EngineTimings(queued_s=0.3, load_s=0.1, prefill_s=0.002, decode_s=0.011, drafts=DRAFTS)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with serving(tmp_path) as running:
        running.engines.replay = answer
        yield running


async def answer(call: Call) -> Items:
    """Stream a whole answer: 12 prompt tokens, 8 of them cached, 34 output tokens."""
    digest = call.adapter.digest if call.adapter else None
    found = Residency.HOST if call.adapter else None
    yield Attempt(call.request_id, "replica-7", 0.001)
    yield AnswerHeader("replica-7", digest, found)
    yield AnswerHeader("replica-7", digest, found, load_s=0.1)
    async for item in repeat(call):
        if isinstance(item, bytes):
            yield FinalUsage(12, 8, 34, (COURSE,))
            yield item


async def answer_after_a_loss(call: Call) -> Items:
    yield Attempt(call.request_id, "replica-3", 0.001, (), "the replica was lost")
    async for item in answer(replace(call, request_id=f"{call.request_id}-1")):
        yield item


async def refuse(call: Call) -> Items:
    yield AnswerHeader("replica-7", None, Residency.HOST)
    yield Refusal("overloaded", "too many wait")


async def fail(call: Call) -> Items:
    raise Unavailable("no replica could answer")
    yield b""


def read(gateway: Gateway, key: str | None) -> bytes:
    got = gateway.request("GET", "/metrics", key)
    assert got.is_success, got.text
    assert got.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return got.content


def test_a_scrapes_connection_is_closed_so_that_each_scrape_reaches_a_live_gateway(
    gateway: Gateway,
) -> None:
    got = gateway.request("GET", "/metrics", gateway.admin_key)
    assert got.headers["connection"] == "close"


def scrape(gateway: Gateway) -> Scraped:
    return Scraped(read(gateway, gateway.admin_key).decode())


def test_the_page_needs_an_admin_key_which_may_be_read_only(gateway: Gateway) -> None:
    _, reader = gateway.catalog.create_key(None, {Scope.READ_ONLY}, actor="test")
    assert read(gateway, reader)
    assert gateway.request("GET", "/metrics", None).status_code == 401
    assert gateway.request("GET", "/metrics", gateway.keys["acme"]).status_code == 403


def test_requests_are_counted_by_outcome(gateway: Gateway) -> None:
    for replay, times in ((answer, 3), (refuse, 2), (fail, 1), (answer_after_a_loss, 1)):
        gateway.engines.replay = replay
        for _ in range(times):
            gateway.post(CHAT, chat())
    gateway.engines.replay = answer
    gateway.post(CHAT, chat("tiny"), tenant="globex")
    gateway.post(CHAT, chat("acme/nothing"))
    gateway.post(CHAT, b"{")
    gateway.request("POST", CHAT, "lk_nobody", json=chat())
    check_with_promtool(read(gateway, gateway.admin_key))
    page = scrape(gateway)
    outcomes = {"finished": 5, "refused": 5, "failed": 1, "cancelled": 0}
    assert {o: page.total("lorikeet_requests_total", outcome=o) for o in outcomes} == outcomes
    codes = {
        "overloaded": 2,
        "unavailable": 1,
        "model_not_found": 1,
        "invalid_value": 1,
        "invalid_api_key": 1,
    }
    assert {c: page.total("lorikeet_request_errors_total", code=c) for c in codes} == codes
    assert page.total("lorikeet_request_errors_total") == sum(codes.values())
    assert page.total("lorikeet_request_retries_total", base_model="tiny") == 1
    assert page.total("lorikeet_tenant_requests_total", tenant="acme", outcome="finished") == 4
    assert page.total("lorikeet_tenant_requests_total", tenant="acme", outcome="refused") == 4
    assert page.labels("lorikeet_tenant_requests_total", "tenant") == {"acme", "globex"}
    assert page.total("lorikeet_requests_total", gateway="gateway", base_model="tiny") == 8


def test_tokens_are_counted_by_tenant_and_by_adapter(gateway: Gateway) -> None:
    gateway.register("globex/other")
    for model, tenant in (("acme/support", "acme"), ("globex/other", "globex"), ("tiny", "acme")):
        assert gateway.post(CHAT, chat(model), tenant=tenant).is_success
    gateway.register("acme/support", seed=1)
    assert eventually(lambda: gateway.post(CHAT, chat("acme/support@2")).is_success)
    page = scrape(gateway)
    for kind, tokens in (("prompt", 12), ("cached", 8), ("output", 34)):
        assert page.total("lorikeet_tenant_tokens_total", tenant="acme", kind=kind) == 3 * tokens
        assert (
            page.total("lorikeet_adapter_tokens_total", adapter="acme/support", kind=kind)
            == 2 * tokens
        )
    for source, drafted, accepted in DRAFTS:
        of_adapter = {"adapter": "acme/support", "source": source}
        assert page.total("lorikeet_adapter_drafted_tokens_total", **of_adapter) == 2 * drafted
        assert page.total("lorikeet_adapter_accepted_tokens_total", **of_adapter) == 2 * accepted
    adapters = {"acme/support": 2, "globex/other": 1}
    for adapter, requests in adapters.items():
        assert page.total("lorikeet_adapter_requests_total", adapter=adapter) == requests
    assert page.labels("lorikeet_adapter_requests_total", "adapter") == adapters.keys()


def test_a_composition_counts_for_each_of_its_adapters(gateway: Gateway) -> None:
    gateway.register("acme/tone", seed=1)
    for model in ("acme/support+acme/tone", "acme/tone"):
        assert gateway.post(CHAT, chat(model)).is_success
    page = scrape(gateway)
    for adapter, requests in {"acme/support": 1, "acme/tone": 2}.items():
        assert page.total("lorikeet_adapter_requests_total", adapter=adapter) == requests
    assert page.labels("lorikeet_adapter_requests_total", "adapter") == {
        "acme/support",
        "acme/tone",
    }
    assert page.total("lorikeet_requests_total") == 2


@pytest.mark.parametrize("stream", [True, False])
def test_latencies_are_counted_by_the_adapters_tier(gateway: Gateway, stream: bool) -> None:
    for model in ("acme/support", "acme/support", "tiny"):
        assert gateway.post(CHAT, chat(model, stream=stream)).is_success
    assert eventually(lambda: not gateway.engines.calls[2:] or len(gateway.engines.closed) == 3)
    page = scrape(gateway)
    for residency, requests in (("host", 2), ("none", 1)):
        for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
            count = f"lorikeet_{name}_seconds_count"
            assert page.total(count, residency=residency, base_model="tiny") == requests
    assert page.total("lorikeet_request_queue_time_seconds_sum") == pytest.approx(3 * (0.3 - 0.1))
    assert (
        page.total("lorikeet_request_queue_time_seconds_bucket", residency="host", le="0.25") == 2
    )
    assert page.total("lorikeet_request_queue_time_seconds_bucket", residency="host", le="0.1") == 0


def test_a_request_is_in_flight_until_its_client_leaves(gateway: Gateway) -> None:
    gateway.engines.replay = endless
    with gateway.openai().chat.completions.create(**chat(stream=True)) as stream:
        next(iter(stream))
        assert scrape(gateway).total("lorikeet_requests_in_flight") == 1
    assert eventually(lambda: len(gateway.engines.closed) == 1)

    def left() -> bool:
        page = scrape(gateway)
        assert page.total("lorikeet_tenant_tokens_total") == 0
        return (
            page.total("lorikeet_requests_total", outcome="cancelled") == 1
            and page.total("lorikeet_requests_in_flight") == 0
            and page.total("lorikeet_time_to_first_token_seconds_count") == 1
        )

    assert eventually(left)


def test_the_page_has_the_memory_of_the_request_log(gateway: Gateway) -> None:
    def kept() -> float:
        return scrape(gateway).total("lorikeet_request_log_bytes")

    assert kept() == 0
    for _ in range(32):  # packed together
        gateway.openai().chat.completions.create(**chat())
    assert eventually(kept)
    assert kept() < 32 * 1000


def test_the_page_has_the_age_of_the_catalog(gateway: Gateway) -> None:
    gateway.register("acme/more")

    def caught_up() -> bool:
        page = scrape(gateway)
        assert 0 <= page.total("lorikeet_catalog_age_seconds") < 5
        return page.total("lorikeet_catalog_seq") == gateway.catalog.reader.refresh().seq

    assert eventually(caught_up)


def test_every_base_model_has_series_before_its_first_request(gateway: Gateway) -> None:
    page = scrape(gateway)
    assert page.labels("lorikeet_requests_total", "base_model") == {"tiny", "wider"}
    assert page.labels("lorikeet_requests_total", "outcome") == {
        "finished",
        "refused",
        "failed",
        "cancelled",
    }


class Others(Peers):
    """Another gateway, with a part of the page that the test sets."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.page = page
        self.asked = 0

    async def poll(self, question: str, *arguments: Any) -> Poll:
        if question != "metrics":
            return Poll((), 0)
        self.asked += 1
        await asyncio.sleep(0.1)
        return Poll((self.page,), 1)


def test_the_page_covers_the_whole_service_and_is_cached_for_a_second(tmp_path: Path) -> None:
    other = GatewayMetrics()
    other.add_base_models(["tiny"])
    others = Others(render(other.collect(), {"gateway": "another"}))
    preemptions = CounterMetricFamily("lorikeet_preemptions_total", "Preemptions.", 3)
    replica = render([preemptions], {"replica": "r"})

    async def pages() -> Sequence[bytes]:
        return [replica]

    with serving(tmp_path, peers=others, metrics_pages=pages) as gateway:
        page = Scraped(read(gateway, gateway.admin_key).decode())
        assert page.labels("lorikeet_requests_total", "gateway") == {"gateway", "another"}
        assert page.total("lorikeet_preemptions_total") == 3
        asked = others.asked
        began = asyncio.run(_many_read(gateway, 8))
        assert others.asked - asked <= 1 + began / FRESH_S


async def _many_read(gateway: Gateway, times: int) -> float:
    """Read the page many times concurrently; return the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.gather(
        *(asyncio.to_thread(read, gateway, gateway.admin_key) for _ in range(times))
    )
    return loop.time() - began_s
