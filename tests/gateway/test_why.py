"""Explained requests: every possible end, visibility, retention and cost."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorikeet.errors import InvalidInput, NotFound, Unavailable
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Call,
    Candidate,
    Cost,
    FinalUsage,
    Refusal,
)
from lorikeet.protocol.peers import Peers
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.request_log.record import RequestTrace
from lorikeet.request_log.request_log import KEPT_S, RequestLog
from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import DraftCounts, DraftSource, EngineTimings
from lorikeet_engine.telemetry.status import LiveStats
from tests.gateway.conftest import Gateway, Items, chat, endless, repeat, serving
from tests.gateway.linked_peers import LinkedPeers, link
from tests.gateway.test_bad_requests import error_of
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
WEIGHED = (
    Candidate("replica-7", Residency.HOST, Cost(0.010, 0.002, 0.005, 0.001, 0.2)),
    Candidate("replica-3", Residency.REMOTE, Cost(0.010, 0.000, 0.500, 0.001, 0.2)),
)
SLOW = EngineTimings(
    queued_s=0.004, load_s=0.003, prefill_s=0.002, decode_s=0.011, preemptions=1, steps=9
)
QUICK = EngineTimings(
    queued_s=0.001,
    prefill_s=0.002,
    decode_s=0.003,
    preemptions=1,
    steps=3,
    drafts=(DraftCounts(DraftSource.LOOKUP, 18, 12), DraftCounts(DraftSource.ANSWERS, 2, 1)),
)


async def told(call: Call) -> Items:
    """Replay an answer with all facts about its replica, after a lost replica."""
    first = call.request_id
    yield Attempt(first, "replica-3", 0.001, WEIGHED[::-1], "the replica was lost")
    yield Attempt(f"{first}-1", "replica-7", 0.002, WEIGHED)
    live = LiveStats(decoding=5, waiting=2)
    yield AnswerHeader("replica-7", call.adapter.digest, Residency.HOST, StatusUpdate(1, live))
    yield AnswerHeader("replica-7", call.adapter.digest, Residency.HOST, load_s=0.003)
    await asyncio.sleep(0.05)
    async for item in repeat(call):
        if isinstance(item, bytes):
            yield FinalUsage(12, 8, 34, (QUICK, SLOW))
            yield item


def ask(gateway: Gateway, request_id: str, tenant: str | None = None) -> dict[str, Any]:
    if tenant is None:
        answer = gateway.admin("GET", f"/requests/{request_id}")
    else:
        answer = gateway.request("GET", f"/v1/requests/{request_id}", gateway.keys[tenant])
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stages(found: dict[str, Any]) -> dict[str, float]:
    return {stage["stage"]: stage["ms"] for stage in found["stages"]}


def test_a_finished_request_is_explained_completely(gateway: Gateway) -> None:
    gateway.engines.replay = told
    sent = time.time()
    answer = gateway.post(CHAT, chat(n=2))
    request_id = answer.headers["x-request-id"]
    assert eventually(
        lambda: ask(gateway, request_id)["outcome"] != "running"
    )  # the answer ends first
    found = ask(gateway, request_id)
    assert sent - 0.1 < found["received"] < time.time()
    said = {key: found[key] for key in ("id", "tenant", "model", "base_model", "adapter", "stream")}
    assert said == {
        "id": request_id,
        "tenant": "acme",
        "model": "acme/support",
        "base_model": "tiny",
        "adapter": "acme/support@1",
        "stream": False,
    }
    (key,) = gateway.catalog.reader.refresh().keys("acme")
    assert found["key_id"] == key.id
    assert (found["outcome"], found["code"]) == ("finished", None)
    assert (found["replica"], found["residency"], found["load_ms"]) == ("replica-7", "host", 3.0)
    assert found["replica_status"] == {"running": 5, "waiting": 2}
    assert found["tokens"] == {"prompt": 12, "cached": 8, "output": 34, "from_host": 0}
    assert (found["preemptions"], found["retries"]) == (2, 1)
    sources = {
        "lookup": {"drafted": 18, "accepted": 12},
        "answers": {"drafted": 2, "accepted": 1},
    }
    assert found["drafts"] == {"drafted": 20, "accepted": 13, "sources": sources}
    engine = {"queue": 1.0, "adapter": 3.0, "prefill": 2.0, "decode": 11.0}  # the slower choice
    took = stages(found)
    assert list(took) == ["validate", "route", "overhead", *engine]
    assert {name: took[name] for name in engine} == engine
    assert sum(took.values()) == pytest.approx(found["total_ms"], abs=0.01)
    assert 50 < found["total_ms"] < 5000
    assert found["first_token_ms"] == pytest.approx(found["total_ms"] - 11.0, abs=0.01)


def test_an_engine_may_begin_before_the_gateway_knows_of_the_attempt(gateway: Gateway) -> None:
    async def told_late(call: Call) -> Items:
        await asyncio.sleep(0.5)
        yield Attempt(call.request_id, "replica-7", 0.5, WEIGHED)
        async for item in repeat(call):
            if isinstance(item, bytes):
                yield FinalUsage(12, 8, 34, (EngineTimings(prefill_s=0.1, decode_s=0.3),))
                yield item

    gateway.engines.replay = told_late
    request_id = gateway.post(CHAT, chat()).headers["x-request-id"]
    assert eventually(lambda: ask(gateway, request_id)["outcome"] != "running")
    found = ask(gateway, request_id)
    took = stages(found)
    assert (took["prefill"], took["decode"]) == (100.0, 300.0)
    assert took["route"] < 500
    assert sum(took.values()) == pytest.approx(found["total_ms"], abs=0.01)


def test_the_choice_of_replica_is_explained(gateway: Gateway) -> None:
    gateway.engines.replay = told
    request_id = gateway.post(CHAT, chat()).headers["x-request-id"]
    lost, taken = ask(gateway, request_id)["attempts"]
    assert (lost["replica"], lost["failure"]) == ("replica-3", "the replica was lost")
    assert (taken["id"], taken["failure"]) == (f"{request_id}-1", None)
    assert taken["taken_ms"] >= lost["taken_ms"]
    best, other = taken["candidates"]
    assert best == {
        "replica": "replica-7",
        "residency": "host",
        "cost_ms": 216.0,
        "prefill_ms": 10.0,
        "queue_ms": 2.0,
        "load_ms": 5.0,
        "others_ms": 1.0,
        "copy_ms": 200.0,
    }
    assert (other["replica"], other["residency"], other["cost_ms"]) == (
        "replica-3",
        "remote",
        711.0,
    )


@pytest.mark.parametrize("form", ["{}", "chatcmpl-{}", "cmpl-{}", "chatcmpl-{}-1", "{}-2"])
def test_a_request_is_found_by_its_answers_id(unchanged: Gateway, form: str) -> None:
    request_id = unchanged.post(CHAT, chat()).headers["x-request-id"]
    assert ask(unchanged, form.format(request_id))["id"] == request_id


def test_a_stream_is_measured_to_its_first_bytes(gateway: Gateway) -> None:
    gateway.engines.replay = told
    request_id = gateway.post(CHAT, chat(stream=True)).headers["x-request-id"]
    found = ask(gateway, request_id)
    assert found["stream"]
    assert 50 < found["first_token_ms"] < found["total_ms"]


def test_a_tenant_sees_only_its_own_requests(gateway: Gateway) -> None:
    gateway.engines.replay = told
    request_id = gateway.post(CHAT, chat()).headers["x-request-id"]
    found = ask(gateway, request_id, "acme")
    assert found["tokens"] == {"prompt": 12, "cached": 8, "output": 34, "from_host": 0}
    assert not {"attempts", "replica_status"} & found.keys()
    unknown = "0" * 32
    answers = [
        gateway.request("GET", f"/v1/requests/{asked}", gateway.keys["globex"])
        for asked in (request_id, unknown, "%2e%2e", "x" * 500)
    ]
    assert {error_of(answer, 404)["code"] for answer in answers} == {"not_found"}
    assert len({answer.content for answer in answers}) == 1
    assert error_of(gateway.admin("GET", f"/requests/{unknown}"), 404)["code"] == "not_found"


def test_a_request_whose_client_disconnected_is_explained_as_far_as_known(gateway: Gateway) -> None:
    gateway.engines.replay = endless
    with gateway.openai().chat.completions.create(**chat(stream=True)) as stream:
        next(iter(stream))
        request_id = gateway.engines.last.request_id
        running = ask(gateway, request_id)
        assert (running["outcome"], running["replica"]) == ("running", "replica-7")
    assert eventually(lambda: ask(gateway, request_id)["outcome"] == "cancelled")
    found = ask(gateway, request_id)
    assert list(stages(found)) == ["validate", "route", "first bytes", "rest"]
    assert sum(stages(found).values()) == pytest.approx(found["total_ms"], abs=0.01)
    assert found["tokens"] is None
    assert found["first_token_ms"] > 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (chat(temperature=9), 400, "invalid_value"),
        (chat("acme/nothing"), 404, "model_not_found"),
        (b"{", 400, "invalid_value"),
    ],
)
def test_a_refused_request_is_explained(
    unchanged: Gateway, body: Any, status: int, code: str
) -> None:
    answer = unchanged.post(CHAT, body)
    error_of(answer, status)
    found = ask(unchanged, answer.headers["x-request-id"])
    assert (found["tenant"], found["outcome"], found["code"]) == ("acme", "refused", code)
    assert list(stages(found)) == ["validate"]
    assert found["replica"] is None


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("overloaded", "refused"), ("context_length_exceeded", "refused"), ("x", "failed")],
)
def test_a_replicas_refusal_is_explained(gateway: Gateway, code: str, outcome: str) -> None:
    async def refuse(call: Call) -> Items:
        yield Attempt(call.request_id, "replica-7", 0.001, WEIGHED)
        yield Refusal(code, "no")

    gateway.engines.replay = refuse
    found = ask(gateway, gateway.post(CHAT, chat()).headers["x-request-id"])
    assert (found["outcome"], found["code"]) == (outcome, code)
    assert list(stages(found)) == ["validate", "route", "first bytes"]


def test_a_refusal_by_a_limit_is_explained(tmp_path: Path) -> None:
    with serving(tmp_path, max_open_requests=1) as gateway:
        gateway.engines.replay = endless
        with gateway.openai().chat.completions.create(**chat(stream=True)) as stream:
            next(iter(stream))
            answer = gateway.post(CHAT, chat())
        assert not answer.is_success
        found = ask(gateway, answer.headers["x-request-id"])
        assert (found["outcome"], found["code"]) == ("refused", error_of(answer, 503)["code"])


@pytest.mark.parametrize("way", ["lost", "refusal"])
def test_a_failure_in_mid_stream_is_explained(gateway: Gateway, way: str) -> None:
    async def lost(call: Call) -> Items:
        async for item in endless(call):
            yield item
            if isinstance(item, bytes):
                break
        if way == "refusal":
            yield Refusal("generation_failed", "the step failed")
        yield Attempt(call.request_id, "replica-7", 0.001, (), "the replica was lost")
        raise Unavailable("the replica was lost")

    gateway.engines.replay = lost
    request_id = gateway.post(CHAT, chat(stream=True)).headers["x-request-id"]
    assert eventually(
        lambda: ask(gateway, request_id)["outcome"] == "failed"
    )  # the stream ends first
    code = {"lost": "unavailable", "refusal": "generation_failed"}[way]
    assert ask(gateway, request_id)["code"] == code


def test_explanations_contain_no_prompt_or_answer(gateway: Gateway) -> None:
    secret = "planted-4711"
    gateway.engines.replay = told
    request_id = gateway.post(CHAT, chat(content=secret)).headers["x-request-id"]
    refused = gateway.post(CHAT, {**chat(), "stop": [secret] * 9}).headers["x-request-id"]
    for each in (request_id, refused):
        seen = json.dumps(ask(gateway, each))
        assert secret not in seen
        assert gateway.keys["acme"] not in seen


def test_every_gateway_can_explain_a_request() -> None:
    ends = [LinkedPeers(), LinkedPeers()]
    link(ends)
    one, other = map(RequestLog, ends)
    trace = one.trace("a" * 32)
    trace.set_caller("acme", "key-1")
    with pytest.raises(InvalidInput), trace.validating():
        raise InvalidInput("no")
    assert asyncio.run(other.find("a" * 32))["code"] == "invalid_value"
    assert asyncio.run(other.find("a" * 32, "acme"))["tenant"] == "acme"
    for asked, tenant in (("a" * 32, "globex"), ("b" * 32, None)):
        with pytest.raises(NotFound):
            asyncio.run(other.find(asked, tenant))


def test_a_tenants_last_requests_come_from_every_gateway() -> None:
    ends = [LinkedPeers(), LinkedPeers()]
    link(ends)
    logs = [RequestLog(end) for end in ends]
    for number in range(70):
        trace = logs[number % 2].trace(f"{number:032x}")
        trace.set_caller("acme" if number % 10 else "globex", "key-1")
        trace._record.received = float(number)
        with trace.answering():
            pass
    running = logs[0].trace("f" * 32)
    running.set_caller("acme", "key-1")
    running.__enter__()
    found = asyncio.run(logs[1].recent("acme"))
    own = [f"{number:032x}" for number in range(70) if number % 10]
    assert [each["id"] for each in found["data"]] == ["f" * 32, *own[::-1]][:50]
    assert (found["data"][0]["outcome"], found["silent"]) == ("running", 0)
    assert {each["tenant"] for each in found["data"]} == {"acme"}
    assert "attempts" not in found["data"][0]  # they tell of others' load


def test_no_request_is_called_unknown_while_a_gateway_is_silent() -> None:
    request_log = RequestLog(LinkedPeers(silent=1))
    with pytest.raises(Unavailable):
        asyncio.run(request_log.find("a" * 32))


def test_records_are_kept_for_an_hour_within_a_limit_of_bytes() -> None:
    now = [0.0]
    request_log = RequestLog(Peers(), kept_bytes=10_000, clock=lambda: now[0])

    def end(number: int) -> None:
        with ended(request_log, f"{number:032x}"):
            pass

    def known(number: int) -> bool:
        try:
            asyncio.run(request_log.find(f"{number:032x}"))
        except NotFound:
            return False
        return True

    for number in range(200):
        end(number)
    kept = [number for number in range(200) if known(number)]
    assert kept == list(range(kept[0], 200))  # the oldest go first
    assert 32 <= len(kept) < 150
    now[0] += KEPT_S - 1
    end(200)
    assert known(199)
    now[0] += 2
    assert not known(199)
    assert known(200)


def test_recording_a_request_takes_microseconds() -> None:
    request_log = RequestLog(Peers())
    rounds = 2000
    best = min(_seconds(request_log, rounds) for _ in range(3))
    assert best / rounds < 100e-6  # some 20 on a quiet machine


def _seconds(request_log: RequestLog, rounds: int) -> float:
    began = time.process_time()
    for number in range(rounds):
        with ended(request_log, f"{number:032x}"):
            pass
    return time.process_time() - began


@contextmanager
def ended(request_log: RequestLog, request_id: str) -> Iterator[RequestTrace]:
    """Return a request with all fields of its record set."""
    trace = request_log.trace(request_id)
    trace.set_caller("acme", "key-1")
    trace.set_model("acme/support")
    with trace:
        trace.on_item(Attempt(request_id, "replica-7", 0.001, WEIGHED * 3))
        trace.on_item(
            AnswerHeader("replica-7", "d" * 64, Residency.GPU, StatusUpdate(1, LiveStats()))
        )
        trace.on_first_bytes()
        trace.on_item(FinalUsage(12, 8, 34, (SLOW,)))
        yield trace
