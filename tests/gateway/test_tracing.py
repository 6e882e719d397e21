"""Trace of one request from gateway to engine, as a collector receives it."""

import asyncio
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.gateway.generate import SCHEMAS
from lorikeet.protocol.messages import Attempt, Call, FinalUsage, Refusal
from lorikeet.protocol.peers import Peers
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tracing.exporter import TraceExporter
from lorikeet.tracing.spans import origin_of
from lorikeet_engine.request import EngineTimings
from tests.gateway.collector import Collector, Told, collecting
from tests.gateway.conftest import Gateway, Items, chat, endless, header, repeat, serving
from tests.gateway.test_why import CHAT, SLOW, ended, told
from tests.processor_time import in_time
from tests.waiting import eventually

ROOT = f"POST {CHAT}"
Traced = tuple[Gateway, Collector]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with (
        collecting() as collector,
        _tracing(tmp_path_factory.mktemp("traced"), collector.url) as gateway,
    ):
        yield gateway, collector


@contextmanager
def _tracing(folder: Path, url: str, share: float = 1.0) -> Iterator[Gateway]:
    with serving(
        folder, name="gateway-1", traces=TraceExporter(url, share, "gateway-1")
    ) as gateway:
        gateway.engines.replay = told
        yield gateway


def _ask(gateway: Gateway, traceparent: str | None = None, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.keys['acme']}"}
    if traceparent is not None:
        headers["traceparent"] = traceparent
    return httpx.post(gateway.url + CHAT, headers=headers, json=chat(**body), timeout=20)


def _heard(collector: Collector, trace_id: str) -> list[Told]:
    """Return a request's spans, which arrive together."""
    assert eventually(lambda: bool(collector.of(trace_id)))
    return collector.of(trace_id)


def _of(traced: Traced, **body: Any) -> list[Told]:
    gateway, collector = traced
    return _heard(collector, _ask(gateway, **body).headers["x-request-id"])


def test_a_request_is_followed_into_the_engine(traced: Traced) -> None:
    began_ns = time.time_ns()
    root, *spans = _of(traced, n=2)
    ended_ns = time.time_ns()
    assert (root.name, root.parent, root.kind) == (ROOT, "", "server")
    assert [span.name for span in spans] == [
        "validate",
        *("attempt", "route", "chat"),  # of the lost replica
        *("attempt", "route", "chat", "adapter", "queue", "prefill", "decode"),
    ]
    validate, lost, _, _, taken, route, replica, *engine = spans
    by_id = {span.id: span for span in (root, *spans)}
    for span in spans:
        over = by_id[span.parent]
        assert over.begin_ns <= span.begin_ns <= span.end_ns <= over.end_ns
    assert began_ns < root.begin_ns < root.end_ns < ended_ns
    assert {validate.parent, lost.parent, taken.parent} == {root.id}
    assert (route.parent, replica.parent) == (taken.id, taken.id)
    assert {span.parent for span in engine} == {replica.id}
    assert (validate.kind, taken.kind, replica.kind) == ("internal", "client", "server")


def test_the_spans_times_are_true_and_add_up(traced: Traced) -> None:
    root, validate, lost, _, _, taken, route, replica, *engine = _of(traced)
    for before, after in ((validate, lost), (lost, taken)):
        assert before.end_ns == after.begin_ns
    assert (validate.begin_ns, taken.end_ns) == (root.begin_ns, root.end_ns)
    assert (taken.begin_ns, replica.begin_ns) == (route.begin_ns, route.end_ns)
    assert route.took_s == pytest.approx(0.002)  # as `told` has it
    assert [span.took_s for span in engine] == pytest.approx(
        [SLOW.load_s, SLOW.queued_s - SLOW.load_s, SLOW.prefill_s, SLOW.decode_s]
    )
    for before, after in pairwise(engine):
        assert before.end_ns == after.begin_ns
    assert root.took_s > 0.05  # which it slept


def test_attributes_have_the_names_of_opentelemetrys_conventions(traced: Traced) -> None:
    gateway, _ = traced
    root, _, lost, _, _, taken, _, replica, *_ = _of(traced, n=2)
    call = gateway.engines.last
    assert call.adapter is not None
    answer = {
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 34,
        "lorikeet.base_model": "tiny",
        "lorikeet.adapter": "acme/support@1",
        "lorikeet.digest": call.adapter.digest,
        "lorikeet.residency": "host",
        "lorikeet.replica": "replica-7",
        "lorikeet.choices": 2,
    }
    assert root.attributes == answer | {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lorikeet",
        "gen_ai.request.model": "acme/support",
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "acme/support@1",
        "lorikeet.request_id": root.trace_id,
        "lorikeet.tenant": "acme",
        "lorikeet.outcome": "finished",
    }
    assert replica.attributes == answer
    assert (lost.error, lost.attributes["lorikeet.replica"]) == (
        "the replica was lost",
        "replica-3",
    )
    assert taken.attributes == {
        "lorikeet.request_id": f"{root.trace_id}-1",
        "lorikeet.replica": "replica-7",
    }
    assert root.error is taken.error is None


def test_the_engines_spans_belong_to_the_replica(traced: Traced) -> None:
    root, *spans = _of(traced)
    own = {"service.namespace": "lorikeet", "service.name": "lorikeet-gateway"}
    there = {"service.namespace": "lorikeet", "service.name": "lorikeet-engine"}
    assert root.resource.items() >= (own | {"service.instance.id": "gateway-1"}).items()
    for span in spans:
        if span.name in ("validate", "attempt", "route"):
            assert span.resource == root.resource
    lost, replica, *_, last = [span.resource for span in spans if span.resource != root.resource]
    assert lost["service.instance.id"] == "replica-3"
    named = there | {"service.instance.id": "replica-7", "lorikeet.base_model": "tiny"}
    assert replica == last == named


def test_a_streams_span_has_its_first_bytes(traced: Traced) -> None:
    root, *_ = _of(traced, stream=True)
    first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0.05 < first_s < root.took_s
    assert root.attributes["gen_ai.request.stream"] is True


def test_the_engines_stages_end_before_their_results_arrive(tmp_path: Path) -> None:
    timings = EngineTimings(queued_s=0.01, load_s=0.004, prefill_s=0.02, decode_s=0.005)

    async def heard_late(call: Call) -> Items:
        yield Attempt(call.request_id, "replica-7", 0.001)
        await asyncio.sleep(0.05)
        yield header(call)  # when the first token has long been made
        async for item in repeat(call):
            if isinstance(item, bytes):
                yield item
        await asyncio.sleep(0.02)
        yield FinalUsage(12, 8, 34, (timings,))

    with collecting() as collector, _tracing(tmp_path, collector.url) as gateway:
        gateway.engines.replay = heard_late
        answer = _ask(gateway, stream=True)
        root, *_, prefill, generate = _heard(collector, answer.headers["x-request-id"])
        first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
        assert (prefill.end_ns - root.begin_ns) / 1e9 == pytest.approx(first_s)
        assert (prefill.took_s, generate.took_s) == pytest.approx((0.02, 0.005))


def test_a_callers_trace_is_continued(traced: Traced) -> None:
    gateway, collector = traced
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    request_id = _ask(gateway, f"00-{trace_id}-{parent}-01").headers["x-request-id"]
    root, validate, *_ = _heard(collector, trace_id)
    assert (root.name, root.parent) == (ROOT, parent)
    assert validate.parent == root.id
    assert root.attributes["lorikeet.request_id"] == request_id


def test_a_request_that_the_caller_does_not_sample_is_not_traced(traced: Traced) -> None:
    gateway, collector = traced
    trace_id = secrets.token_hex(16)
    request_id = _ask(gateway, f"00-{trace_id}-{secrets.token_hex(8)}-00").headers["x-request-id"]
    _of(traced)  # a later one is there
    assert not collector.of(trace_id)
    assert not collector.of(request_id)


@pytest.mark.parametrize(
    "traceparent", ["", "00-0-0-01", f"00-{'0' * 32}-{'1' * 16}-01", "ff-" + "1" * 49, "x" * 5000]
)
def test_a_broken_traceparent_is_ignored(traced: Traced, traceparent: str) -> None:
    gateway, collector = traced
    answer = _ask(gateway, traceparent)
    assert answer.is_success
    assert _heard(collector, answer.headers["x-request-id"])[0].parent == ""


def test_a_share_is_sampled_and_callers_decisions_are_respected(traced: Traced) -> None:
    ids = [secrets.token_hex(16) for _ in range(4000)]
    kept = {i for i in ids if origin_of(i, None, 0.3)}
    assert 0.25 < len(kept) / len(ids) < 0.35
    assert kept < {i for i in ids if origin_of(i, None, 0.6)}
    assert all(origin_of(i, None, 1.0) for i in ids)
    assert not any(origin_of(i, None, 0.0) for i in ids)
    sampled = origin_of(ids[0], f"00-{'a' * 32}-{'b' * 16}-01", 0.0)
    assert sampled is not None
    assert sampled.trace_id == int("a" * 32, 16)


@pytest.mark.parametrize(
    ("body", "status", "code", "outcome"),
    [
        ({"temperature": 9}, 400, "invalid_value", "refused"),
        ({"model": "acme/nothing"}, 404, "model_not_found", "refused"),
    ],
)
def test_a_refused_request_is_traced_with_its_code(
    traced: Traced, body: Any, status: int, code: str, outcome: str
) -> None:
    root, *spans = _of(traced, **body)
    assert [span.name for span in spans] == ["validate"]
    assert spans[0].end_ns == root.end_ns
    said = [root.attributes[f"{name}"] for name in ("http.response.status_code", "error.type")]
    assert (said, root.attributes["lorikeet.outcome"]) == ([status, code], outcome)
    assert root.error is None  # a bad request is no error of the service


def test_a_failed_request_is_an_error(tmp_path: Path) -> None:
    async def broken(call: Call) -> Items:
        yield header(call)
        yield Refusal("generation_failed", "the step failed")

    with collecting() as collector, _tracing(tmp_path, collector.url) as gateway:
        gateway.engines.replay = broken
        root, *_ = _heard(collector, _ask(gateway).headers["x-request-id"])
        assert root.error == root.attributes["error.type"] == "generation_failed"
        assert root.attributes["http.response.status_code"] == 500
        gateway.engines.replay = endless
        with gateway.openai().chat.completions.create(**chat(stream=True)) as stream:
            next(iter(stream))
            request_id = gateway.engines.last.request_id
        root, *_ = _heard(collector, request_id)
        assert (root.attributes["lorikeet.outcome"], root.error) == ("cancelled", None)


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_route_that_generates_is_an_operation(traced: Traced, path: str) -> None:
    gateway, collector = traced
    answer = gateway.post(path, chat(model="acme/nothing", max_tokens=9))
    root, *_ = _heard(collector, answer.headers["x-request-id"])
    assert root.name == f"POST {path}"
    assert root.attributes["gen_ai.operation.name"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_lookup_of_a_stored_response_is_traced_without_its_id(
    traced: Traced, method: str
) -> None:
    gateway, collector = traced
    path = f"/v1/responses/resp_{'0' * 32}"
    answer = gateway.request(method, path, gateway.keys["acme"])
    root, *spans = _heard(collector, answer.headers["x-request-id"])
    assert root.name == f"{method} /v1/responses/{{response_id}}"
    assert root.attributes["http.request.method"] == method
    assert root.attributes["http.response.status_code"] == answer.status_code == 404
    assert [span.name for span in spans] == ["validate"]


def test_a_refusals_span_has_its_http_status(tmp_path: Path) -> None:
    async def full(call: Call) -> Items:
        yield header(call)
        yield Refusal("overloaded", "later")

    with collecting() as collector, _tracing(tmp_path, collector.url) as gateway:
        gateway.engines.replay = full
        for path, status in ((CHAT, 503), ("/v1/messages", 529)):
            answer = gateway.post(path, chat(max_tokens=9))
            root, *_ = _heard(collector, answer.headers["x-request-id"])
            assert answer.status_code == root.attributes["http.response.status_code"] == status


def test_a_request_without_a_key_is_not_traced(traced: Traced) -> None:
    gateway, collector = traced
    before = len(collector.spans)
    answer = gateway.request("POST", CHAT, None, json=chat())
    assert answer.status_code == 401
    _of(traced)
    assert not collector.of(answer.headers["x-request-id"])
    assert len(collector.spans) > before


def test_traces_contain_no_prompt_answer_or_key(traced: Traced) -> None:
    gateway, collector = traced
    _of(traced, content="planted-4711")  # which is the answer, too
    _of(traced, content="x", stop=["planted-4711"] * 9)
    seen = b"".join(collector.bodies)
    assert b"acme/support" in seen
    assert b"planted" not in seen
    assert gateway.keys["acme"].encode() not in seen


def test_a_hanging_collector_delays_no_request(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = TraceExporter(f"http://127.0.0.1:{silent.getsockname()[1]}", 1.0, "gateway-1")
        with serving(tmp_path, traces=traces) as gateway:
            assert max(_ask(gateway).elapsed.total_seconds() for _ in range(10)) < 3.0
            request_log = RequestLog(Peers())
            request_log.subscribe(traces.ended)
            began_s = time.process_time()
            for number in range(1500):
                with ended(request_log, f"{number:032x}"):
                    pass
            took_s = time.process_time() - began_s
            assert in_time(took_s / 1500, 1e-3)  # some 140 µs on a quiet machine
            waiting = traces._queue._batch_processor._queue
            assert 7000 < len(waiting) <= 8192 < 1500 * 9
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 15  # waits 2 s for pending spans, not 30


def test_a_failing_collector_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lorikeet.tracing")
    with collecting() as collector, _tracing(tmp_path, collector.url) as gateway:
        for collector.status in (400, 400, 200, 200):
            _heard(collector, _ask(gateway).headers["x-request-id"])
        url = f"{collector.url}/v1/traces"
    said = [r.message for r in caplog.records if getattr(r, "collector", None) == url]
    assert said == ["collector_unreachable", "collector_reachable"]
