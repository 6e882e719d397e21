"""Limits as clients see them: headers, refusals, and charges of requests."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lorikeet.apis.chat.answer import EventStream
from lorikeet.batch_store import BatchStore
from lorikeet.catalog.records import Scope, TenantRecord
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import StoredObject
from lorikeet.errors import LimitStatus, StoreError, StoreRefused, Unavailable
from lorikeet.file_store import FileStore
from lorikeet.gateway.error_responses import error_response
from lorikeet.gateway.routes.files import StoredFiles
from lorikeet.gateway.routes.limits import FilesUse
from lorikeet.prices import COST_UNITS, FREE, Price
from lorikeet.protocol.messages import AnswerHeader, Call, FinalUsage, Refusal, RunningUsage
from lorikeet.tenancy.rate_limiter import limit_headers
from lorikeet.usage.ledger import UsageCounts
from tests.gateway.conftest import (
    Gateway,
    Items,
    chat,
    endless,
    header,
    leaving,
    repeat,
    serving,
)
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.waiting import eventually

BODY = chat("tiny", "hello", max_tokens=100)


def add(gateway: Gateway, tenant: str, of_key: dict[str, Any] | None = None, **limits: Any) -> None:
    """A tenant whose burst is ten minutes: a new gateway begins with a tenth of that."""
    gateway.catalog.create_tenant(tenant, actor="test", burst_s=600.0, **limits)
    made = gateway.catalog.create_key(tenant, {Scope.INFER}, actor="test", **(of_key or {}))
    gateway.keys[tenant] = made[1]


def remaining(answer: httpx.Response, kind: str = "tokens") -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{kind}"])


def used(prompt: int, answer: int) -> Any:
    """Return a replay that reports this usage."""

    async def replay(call: Call) -> Items:
        async for item in repeat(call):
            if isinstance(item, bytes) and b"finish_reason" in item:
                yield FinalUsage(prompt, 0, answer)
            yield item

    return replay


def test_answers_have_headers_with_the_limits_status(gateway: Gateway) -> None:
    add(gateway, "small", requests_per_min=60, tokens_per_min=6000)
    for stream in (False, True):
        headers = gateway.post(CHAT, {**BODY, "stream": stream}, tenant="small").headers
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-limit-tokens"] == "6000"
    assert 58 <= int(headers["x-ratelimit-remaining-requests"]) <= 62
    assert headers["x-ratelimit-reset-requests"].startswith("9m")  # the burst is ten minutes' worth
    assert 5700 < int(headers["x-ratelimit-remaining-tokens"]) < 6200


def test_without_limits_there_are_no_limit_headers(unchanged: Gateway) -> None:
    answer = unchanged.post(CHAT, BODY)
    assert not any(name.startswith("x-ratelimit") for name in answer.headers)


def test_a_refusal_names_the_limit_and_when_to_retry(gateway: Gateway) -> None:
    add(gateway, "small", requests_per_min=2)
    for _ in range(2):
        assert gateway.post(CHAT, BODY, tenant="small").status_code == 200
    refused = gateway.post(CHAT, BODY, tenant="small")
    error = error_of(refused, 429)
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "2 requests per minute is this tenant's limit" in error["message"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 25 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-reset-requests"].startswith(("9m", "10m"))
    with pytest.raises(openai.RateLimitError):
        gateway.openai("small").chat.completions.create(**BODY)


def test_a_keys_own_limit_is_named(gateway: Gateway) -> None:
    add(gateway, "small", of_key={"requests_per_min": 1, "burst_s": 600.0}, requests_per_min=60)
    assert gateway.post(CHAT, BODY, tenant="small").headers["x-ratelimit-limit-requests"] == "1"
    error = error_of(gateway.post(CHAT, BODY, tenant="small"), 429)
    assert "1 requests per minute is this key's limit" in error["message"]


def test_a_request_over_a_limit_is_refused_before_its_body_is_read(gateway: Gateway) -> None:
    add(gateway, "small", requests_per_min=1)
    gateway.post(CHAT, b"{not json", tenant="small")  # counts, as it used the limit of requests
    assert gateway.post(CHAT, b"{not json", tenant="small").status_code == 429


def test_clients_do_not_sleep_through_a_retry_after_of_minutes(gateway: Gateway) -> None:
    add(gateway, "small", tokens_per_min=6000)
    gateway.engines.replay = used(40, 200_000)
    assert gateway.post(CHAT, BODY, tenant="small").is_success
    assert eventually(lambda: gateway.post(CHAT, BODY, tenant="small").status_code == 429)
    refused = gateway.post(CHAT, BODY, tenant="small")
    assert int(refused.headers["retry-after"]) > 60
    assert refused.headers["x-should-retry"] == "false"
    began_s = time.monotonic()
    with pytest.raises(openai.RateLimitError):
        gateway.openai("small").with_options(max_retries=2).chat.completions.create(**BODY)
    with pytest.raises(anthropic.RateLimitError):
        gateway.anthropic("small", max_retries=2).messages.create(**BODY)
    assert time.monotonic() - began_s < 30


def test_clients_do_not_retry_for_an_adapter_whose_base_model_is_not_served(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(gateway.base_models, "tiny")
    refused = gateway.post(CHAT, chat())
    assert "LORIKEET_BASE_MODELS" in error_of(refused, 503)["message"]
    assert refused.headers["x-should-retry"] == "false"
    began_s = time.monotonic()
    with pytest.raises(openai.InternalServerError):
        gateway.openai().with_options(max_retries=2).chat.completions.create(**chat())
    with pytest.raises(anthropic.InternalServerError):
        gateway.anthropic(max_retries=2).messages.create(max_tokens=5, **chat())
    assert time.monotonic() - began_s < 30


def test_clients_do_not_retry_what_the_store_refuses() -> None:
    refused = error_response(StoreRefused("renew the credentials"), {"path": CHAT, "headers": []})
    assert refused.status_code == 503
    assert refused.headers["x-should-retry"] == "false"


def test_a_short_retry_after_leaves_the_decision_to_the_client(gateway: Gateway) -> None:
    gateway.catalog.create_tenant("brief", actor="test", requests_per_min=2, burst_s=30.0)
    gateway.keys["brief"] = gateway.catalog.create_key("brief", {Scope.INFER}, actor="test")[1]
    answers = [gateway.post(CHAT, BODY, tenant="brief") for _ in range(4)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) <= 60
    assert "x-should-retry" not in refused.headers


def test_tokens_are_reserved_until_their_usage_is_known(gateway: Gateway) -> None:
    add(gateway, "small", tokens_per_min=6000)
    gateway.engines.replay = used(40, 60)
    for stream in (False, True):
        gateway.post(CHAT, {**BODY, "stream": stream, "max_tokens": 2000}, tenant="small")
    left = remaining(gateway.post(CHAT, BODY, tenant="small"))
    assert 5600 < left < 6000  # two settled, one reserved; not 2 × 2,000


@pytest.mark.parametrize(
    "failure", [Refusal("generation_failed", "no"), Unavailable("lost"), ZeroDivisionError()]
)
def test_a_failure_before_the_first_byte_costs_no_tokens(
    gateway: Gateway, failure: Refusal | Exception
) -> None:
    add(gateway, "small", tokens_per_min=6000)

    async def fail(call: Call) -> Items:
        yield header(call)
        if isinstance(failure, Exception):
            raise failure
        yield failure

    gateway.engines.replay = fail
    assert gateway.post(CHAT, {**BODY, "max_tokens": 3000}, tenant="small").status_code >= 500
    gateway.engines.replay = repeat
    assert remaining(gateway.post(CHAT, BODY, tenant="small")) > 5800


def test_the_reservation_counts_if_the_client_disconnects(gateway: Gateway) -> None:
    add(gateway, "small", tokens_per_min=6000)
    gateway.engines.replay = endless
    body = {**BODY, "stream": True, "max_tokens": 3000}
    with gateway.openai("small").chat.completions.create(**body) as stream:
        next(iter(stream))
    assert eventually(lambda: len(gateway.engines.closed) == 1)
    gateway.engines.replay = repeat
    assert remaining(gateway.post(CHAT, BODY, tenant="small")) < 5000  # 100 more each second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [False, True], ids=["the client leaves", "the replica is lost"])
def test_generated_tokens_count_if_a_broken_answer_exceeds_its_reservation(
    gateway: Gateway, stream: bool, cut: bool
) -> None:
    """Holds before the client reads anything, too: tool calls, thinking, an unstreamed answer."""
    if cut and not stream:
        pytest.skip("a call that fails before its first byte takes nothing")
    add(gateway, "small", tokens_per_min=6000)
    told = threading.Event()

    async def long(call: Call) -> Items:
        yield header(call)
        if cut:
            yield EventStream(call).delta(0, "a ")
        for made in (64, 1000, 2000):
            yield RunningUsage(made)
        told.set()
        if cut:
            raise Unavailable("lost")
        await asyncio.sleep(60)

    gateway.engines.replay = long
    body = {**BODY, "stream": stream, "max_tokens": 10}
    began_s = time.monotonic()
    with leaving(gateway, "POST", CHAT, gateway.keys["small"], json.dumps(body).encode()):
        assert told.wait(20)
    assert eventually(lambda: in_flight(gateway) == 0)  # settled before this
    gateway.engines.replay = repeat
    left = remaining(gateway.post(CHAT, BODY, tenant="small"))
    refilled = 100 * (time.monotonic() - began_s)
    assert 3500 < left - refilled < 4000


def in_flight(gateway: Gateway) -> float:
    page = gateway.request("GET", "/metrics", gateway.admin_key).text
    (count,) = re.findall(r"^lorikeet_requests_in_flight\S* (\S+)$", page, re.MULTILINE)
    return float(count)


class Written:
    """Recorded usage set by a test."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def of(self, tenant: str) -> UsageCounts:
        return UsageCounts(output_tokens=self.tokens)

    def refresh(self) -> None:
        pass


def test_a_used_up_budget_is_insufficient_quota(tmp_path: Path) -> None:
    with serving(tmp_path, recorded_usage=Written(1000)) as gateway:
        add(gateway, "small", tokens_per_month=1001)
        assert gateway.post(CHAT, BODY, tenant="small").status_code == 200
        # settled a moment after the answer has ended
        assert eventually(lambda: gateway.post(CHAT, BODY, tenant="small").status_code == 429)
        refused = gateway.post(CHAT, BODY, tenant="small")
        error = error_of(refused, 429)
        assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["x-should-retry"] == "false"
        sent: list[httpx.Request] = []
        with (
            httpx.Client(event_hooks={"request": [sent.append]}) as transport,
            pytest.raises(openai.RateLimitError),
        ):
            openai.OpenAI(
                base_url=f"{gateway.url}/v1",
                api_key=gateway.keys["small"],
                max_retries=5,
                http_client=transport,
            ).chat.completions.create(**BODY)
        assert len(sent) == 1  # the client does not retry


def test_a_budget_in_money_has_a_price_for_each_class_of_tokens(tmp_path: Path) -> None:
    async def replay(call: Call) -> Items:
        async for item in repeat(call):
            if isinstance(item, bytes) and b"finish_reason" in item:
                yield FinalUsage(100, 60, 10)
            yield item

    prices = {"tiny": Price(3_000_000, 1_000_000, 7_000_000)}
    prices["acme/support"] = Price(*(10 * each for each in prices["tiny"]))
    of_base = (40 * 3 + 60 * 1 + 10 * 7) * 1_000_000 / COST_UNITS
    prices["tiny:flex"] = FREE
    with serving(tmp_path, prices=prices) as gateway:
        gateway.engines.replay = replay
        gateway.register("acme/support", shared=True)
        add(gateway, "small", cost_per_month=12 * of_base)
        flex = {"model": "tiny", "service_tier": "flex"}
        for more in (flex, flex, {"model": "acme/support"}, {}, {}):
            assert gateway.post(CHAT, BODY | more, tenant="small").status_code == 200
            assert eventually(lambda: in_flight(gateway) == 0)
        refused = gateway.post(CHAT, BODY, tenant="small")
        error = error_of(refused, 429)
        assert error["code"] == "insufficient_quota"
        assert (
            "budget of 0.003 a month, by the service's prices, is used up until" in error["message"]
        )
        assert int(refused.headers["retry-after"]) > 0


def test_a_call_has_its_scheduling_params(tmp_path: Path) -> None:
    with serving(tmp_path, max_queue_s=7.0) as gateway:
        add(gateway, "big", of_key={"max_context": 50, "priority": 2}, max_context=90, weight=3.0)
        path, headers = gateway.url + CHAT, {"authorization": f"Bearer {gateway.keys['big']}"}
        waiting = headers | {"x-lorikeet-max-adapter-wait-ms": "1500"}
        body = BODY | {"max_tokens": 9}
        assert httpx.post(path, json=body, headers=waiting).status_code == 200
        call = gateway.engines.last
        scheduling = call.scheduling
        assert (scheduling.tenant, scheduling.weight, scheduling.priority) == ("big", 3.0, 2)
        assert (scheduling.max_queue_s, scheduling.max_load_s) == (7.0, 1.5)
        assert call.max_context == 50
        httpx.post(path, json=body, headers=headers)
        assert gateway.engines.last.scheduling.max_load_s is None


@pytest.mark.parametrize("wait", ["-1", "0.5", "soon", "", "99999999999", "٣"])
def test_a_bad_wait_is_refused_by_name(unchanged: Gateway, wait: str) -> None:
    headers = {
        b"authorization": f"Bearer {unchanged.keys['acme']}".encode(),
        b"x-lorikeet-max-adapter-wait-ms": wait.encode(),
    }
    answer = httpx.post(unchanged.url + CHAT, json=BODY, headers=headers)
    assert error_of(answer, 400)["param"] == "x-lorikeet-max-adapter-wait-ms"


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_has_the_adapters_load_time(gateway: Gateway, stream: bool) -> None:
    async def cold(call: Call) -> Items:
        found = header(call)
        yield found
        yield AnswerHeader(found.replica, found.digest, found.residency, load_s=0.2504)
        async for item in repeat(call):
            if not isinstance(item, AnswerHeader):
                yield item

    gateway.engines.replay = cold
    answer = gateway.post(CHAT, chat(stream=stream))
    assert answer.headers["x-lorikeet-residency"] == "host"
    assert answer.headers["x-lorikeet-adapter-load-ms"] == "250"
    base = gateway.post(CHAT, chat("tiny", stream=stream))
    assert "x-lorikeet-adapter-load-ms" not in base.headers


@pytest.mark.parametrize("code", ["adapter_not_ready", "overloaded"])
def test_a_replicas_refusal_has_retry_after(unchanged: Gateway, code: str) -> None:
    async def refuse(call: Call) -> Items:
        yield Refusal(code, "not now", None, retry_after_s=4.2)

    unchanged.engines.replay = refuse
    refused = unchanged.post(CHAT, chat())
    assert error_of(refused, 503)["type"] == "server_error"
    assert refused.headers["retry-after"] == "5"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (1.2, "2s"),
        (59.5, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (90061, "25h1m1s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, said: str) -> None:
    headers = limit_headers([LimitStatus("requests", 60, 1, seconds)])
    assert headers["x-ratelimit-reset-requests"] == said


def test_many_at_once_stay_within_the_limit(gateway: Gateway) -> None:
    add(gateway, "small", requests_per_min=20)
    gateway.post(CHAT, BODY, tenant="small")

    async def ask_all() -> list[int]:
        headers = {"authorization": f"Bearer {gateway.keys['small']}"}
        async with httpx.AsyncClient(headers=headers, timeout=20) as client:
            asks = (client.post(gateway.url + CHAT, json=BODY) for _ in range(60))
            return [answer.status_code for answer in await asyncio.gather(*asks)]

    statuses = asyncio.run(ask_all())
    assert 19 <= statuses.count(200) <= 21
    assert statuses.count(200) + statuses.count(429) == 60


def test_limits_show_what_is_used_of_them(gateway: Gateway) -> None:
    of_key = {"requests_per_min": 100, "name": "ci", "adapters": ("*",)}
    add(
        gateway,
        "initech",
        of_key,
        tokens_per_min=1000,
        max_concurrent=3,
        max_context=50,
        tokens_per_month=10**6,
        max_adapters=4,
    )
    gateway.register("initech/own")
    gateway.engines.replay = endless

    def shown() -> dict[str, Any]:
        answer = gateway.request("GET", "/v1/limits", gateway.keys["initech"])
        limits: dict[str, Any] = answer.raise_for_status().json()
        return limits

    def uses() -> dict[tuple[str, str], Any]:
        return {(row["of"], row["limit"]): row for row in shown()["data"]}

    before = uses()
    said = shown()
    assert (said["tenant"], said["key_name"], said["adapters"]) == ("initech", "ci", ["*"])
    assert (
        before["tenant", "max_concurrent"] | {"most": 3, "used": 0}
        == (before["tenant", "max_concurrent"])
    )
    assert before["tenant", "max_context"]["used"] is None
    assert before["tenant", "max_adapters"]["used"] == 1
    assert before["tenant", "tokens_per_min"]["burst"] == 10_000
    assert before["key", "requests_per_min"]["most"] == 100
    body = json.dumps(chat("initech/own", "hello", max_tokens=40, stream=True)).encode()
    with leaving(gateway, "POST", CHAT, gateway.keys["initech"], body):
        assert eventually(lambda: uses()["tenant", "max_concurrent"]["used"] == 1)
    assert eventually(lambda: uses()["tenant", "max_concurrent"]["used"] == 0)
    after = uses()
    assert after["tenant", "tokens_per_month"]["used"] >= 40


def test_a_tenant_without_limits_has_none_to_show(gateway: Gateway) -> None:
    answer = gateway.request("GET", "/v1/limits", gateway.keys["globex"]).json()
    services = {"files_bytes", "max_files", "open_batches"}
    assert ({row["limit"] for row in answer["data"]}, answer["adapters"]) == (services, None)


def test_a_store_that_failed_is_not_asked_for_the_use_of_files_again_at_once(
    tmp_path: Path,
) -> None:
    class Away(LocalStore):
        reads = 0

        def scan(self, prefix: str) -> Iterator[StoredObject]:
            self.reads += 1
            raise StoreError(prefix)

    async def shown() -> list[list[float | None]]:
        files = StoredFiles(FileStore(store, 100, time.time))
        use = FilesUse(files, BatchStore(store, 20, time.time))
        return [[row.used for row in await use.limits(TenantRecord("acme", 0.0))] for _ in "ab"]

    store = Away(tmp_path)
    assert asyncio.run(shown()) == [[None] * 3] * 2
    assert store.reads == 1
