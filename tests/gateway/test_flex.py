"""Requests of service tier flex: served in the background, and counted apart."""

from dataclasses import replace
from typing import Any

import pytest

from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.protocol.messages import FinalUsage
from lorikeet.request_log.record import RequestRecord
from tests.gateway.conftest import Gateway, chat

RESPONSE = {"model": "tiny", "input": "hello there"}


@pytest.fixture
def gateway(unchanged: Gateway) -> Gateway:
    return unchanged


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat()), ("/v1/responses", RESPONSE)]
)
@pytest.mark.parametrize("tier", ["flex", "default", "auto", None])
def test_only_flex_runs_in_the_background(
    gateway: Gateway, path: str, body: dict[str, Any], tier: str | None
) -> None:
    answer = gateway.post(path, body | {"service_tier": tier})
    assert answer.is_success
    assert gateway.engines.last.scheduling.background is (tier == "flex")
    assert answer.json()["service_tier"] == ("flex" if tier == "flex" else "default")


def test_streams_name_the_tier(gateway: Gateway) -> None:
    stream = gateway.openai().chat.completions.create(**chat(), service_tier="flex", stream=True)
    assert {chunk.service_tier for chunk in stream} == {"flex"}


def test_tokens_of_flex_are_counted_apart_and_its_times_not_at_all() -> None:
    metrics = GatewayMetrics()

    def shown(name: str) -> float:
        samples = [each for metric in metrics.collect() for each in metric.samples]
        return sum(each.value for each in samples if each.name == name)

    record = RequestRecord(
        "r",
        "/v1/chat/completions",
        None,
        0.0,
        base_model="tiny",
        replica="r0",
        usage=FinalUsage(30, 10, 4),
        ended=True,
        until_s=1.0,
    )
    tokens, times = "lorikeet_flex_tokens_total", "lorikeet_e2e_request_latency_seconds_count"
    metrics.count(record)
    assert (shown(tokens), shown(times)) == (0, 1)
    metrics.count(replace(record, background=True))
    assert (shown(tokens), shown(times)) == (34, 1)
    assert shown("lorikeet_requests_total") == 2
