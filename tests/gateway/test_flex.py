"""Requests of service tier flex: served in the background, and counted apart."""

from typing import Any

import pytest

from tests.gateway.conftest import Gateway, chat
from tests.waiting import eventually

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


def test_tokens_of_flex_have_a_metric_of_their_own(gateway: Gateway) -> None:
    def shown(name: str) -> float:
        text = gateway.request("GET", "/metrics", gateway.admin_key).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    tokens, times = "lorikeet_flex_tokens_total", "lorikeet_e2e_request_latency_seconds_count"
    gateway.post("/v1/chat/completions", chat(service_tier="flex"))
    assert eventually(lambda: shown(tokens) > 0)
    flexed, timed = shown(tokens), shown(times)
    gateway.post("/v1/chat/completions", chat())
    assert eventually(lambda: shown(times) == timed + 1), "and flex was not among the times"
    assert shown(tokens) == flexed
    gateway.post("/v1/chat/completions", chat(service_tier="flex"))
    assert eventually(lambda: shown(tokens) == flexed + 4)
    assert shown(times) == timed + 1
