"""Trace of one request through the running service, as a collector receives it."""

import secrets

import httpx
import pytest

from tests.e2e.conftest import Crowd, Service
from tests.gateway.collector import Collector
from tests.waiting import eventually


def test_a_trace_spans_a_request_from_its_caller_into_the_engine(
    service: Service, crowd: Crowd, collector: Collector
) -> None:
    (target,) = crowd.adapters(1)
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    answer = httpx.post(
        f"{service.url}/v1/completions",
        headers={
            "authorization": f"Bearer {target.key}",
            "traceparent": f"00-{trace_id}-{caller}-01",
        },
        json={
            "model": target.model,
            "prompt": "once upon a time",
            "max_tokens": 24,
            "ignore_eos": True,
            "stream": True,
        },
        timeout=60,
    )
    assert answer.raise_for_status().text.endswith("data: [DONE]\n\n")
    assert eventually(lambda: bool(collector.of(trace_id)), within_s=10)
    root, *spans = collector.of(trace_id)
    assert [span.name for span in spans] == [
        *("validate", "attempt", "route", "text_completion"),
        *("adapter", "queue", "prefill", "decode"),
    ]
    assert (root.name, root.parent) == ("POST /v1/completions", caller)
    assert root.attributes["lorikeet.residency"] == "remote"
    assert root.attributes["gen_ai.usage.output_tokens"] == 24
    by_id = {span.id: span for span in (root, *spans)}
    for span in spans:
        over = by_id[span.parent]
        assert over.begin_ns <= span.begin_ns <= span.end_ns <= over.end_ns
    *_, replica, adapter, queue, prefill, generate = spans
    named = answer.headers["x-lorikeet-replica"]
    assert replica.resource["service.instance.id"] == generate.resource["service.instance.id"]
    assert replica.resource["service.instance.id"] == named
    assert adapter.took_s > 0  # no replica had the adapter
    assert adapter.end_ns == queue.begin_ns
    first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    # the gateway learns of the prefill's end late if the machine is busy
    assert (prefill.end_ns - root.begin_ns) / 1e9 <= first_s + 0.01
    stages_s = sum(span.took_s for span in (adapter, queue, prefill, generate))
    assert 0.2 * root.took_s < stages_s < root.took_s
    load_s = int(answer.headers["x-lorikeet-adapter-load-ms"]) / 1000
    assert adapter.took_s == pytest.approx(load_s, abs=0.001)
