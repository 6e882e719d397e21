"""Explanations of requests by the running service, and usage counted for them."""

import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import USAGE_FLUSH_S, Crowd, Service
from tests.e2e.load import Load, Outcome, Target
from tests.e2e.service_processes import complete, engine_processes
from tests.waiting import eventually


def generate(service: Service, target: Target, **body: Any) -> httpx.Response:
    answer = httpx.post(
        f"{service.url}/v1/completions",
        headers={"Authorization": f"Bearer {target.key}"},
        json={"model": target.model, "prompt": "once upon a time", **body},
        timeout=60,
    )
    return answer.raise_for_status()


def why(service: Service, request_id: str) -> dict[str, Any]:
    return service.admin("GET", f"/requests/{request_id}").raise_for_status().json()


def used(service: Service, target: Target) -> dict[str, Any]:
    """Usage written for an adapter; {} if there is none yet."""
    rows = service.admin("GET", "/usage").raise_for_status().json()["data"]
    found = [row for row in rows if row["adapter"] == target.model]
    return found[0] if found else {}


def test_a_request_is_explained_and_counted(service: Service, crowd: Crowd) -> None:
    (target,) = crowd.adapters(1)
    sent_s = time.monotonic()
    answer = generate(service, target, max_tokens=24, n=2, ignore_eos=True, seed=1)
    took_ms = 1000 * (time.monotonic() - sent_s)
    explanation, usage = why(service, answer.headers["x-request-id"]), answer.json()["usage"]
    assert (explanation["tenant"], explanation["outcome"]) == ("crowd", "finished")
    assert (explanation["replica"], explanation["retries"]) == (
        answer.headers["x-lorikeet-replica"],
        0,
    )
    assert explanation["residency"] == answer.headers["x-lorikeet-residency"] == "remote"
    stages = {stage["stage"]: stage["ms"] for stage in explanation["stages"]}
    expected = "validate route overhead queue adapter prefill decode"
    assert list(stages) == expected.split()
    assert sum(stages.values()) == pytest.approx(explanation["total_ms"], abs=5)
    assert took_ms - 100 < explanation["total_ms"] < took_ms
    assert stages["adapter"] > 0  # no replica had the adapter
    assert stages["decode"] > stages["prefill"] > 0
    (attempt,) = explanation["attempts"]
    assert attempt["replica"] == explanation["replica"]
    costs = [each["cost_ms"] for each in attempt["candidates"]]
    assert costs == sorted(costs)
    assert costs[0] > 0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert explanation["tokens"] == {
        "prompt": usage["prompt_tokens"],
        "cached": cached,
        "output": usage["completion_tokens"],
        "from_host": 0,
    }
    assert usage["completion_tokens"] == 48

    def counted() -> bool:
        row = used(service, target)
        return bool(row) and row["requests"] == 1 and row["slot_s"] > 0

    assert eventually(counted, within_s=USAGE_FLUSH_S + 5)
    row = used(service, target)
    said = (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"])
    assert said == (usage["prompt_tokens"], cached, 48)
    assert (row["loads"], row["load_bytes"] > 0) == (1, True)
    engine_s = sum(stages[name] for name in ("prefill", "decode")) / 1000
    assert 0.5 * engine_s < row["slot_s"] < explanation["total_ms"] / 1000
    own = httpx.get(
        f"{service.url}/v1/usage", headers={"Authorization": f"Bearer {target.key}"}, timeout=30
    ).json()["data"]
    assert {k: v for k, v in row.items() if k != "tenant"} in own


@pytest.mark.soak
def test_a_killed_replica_loses_no_usage(service: Service, crowd: Crowd) -> None:
    """Send only requests of 16 tokens, so that a loss is known to the token."""
    targets = crowd.adapters(3)
    with Load(service.url, targets, streams=6, tokens=16) as load:
        load.wait_for(100)
        time.sleep(2 * USAGE_FLUSH_S)
        os.kill(next(iter(engine_processes(service))), signal.SIGKILL)
        time.sleep(2 * USAGE_FLUSH_S)
    whole = [result for result in load.results if result.outcome is Outcome.WHOLE]
    sent = 16 * len(whole)
    assert complete(service)
    time.sleep(2 * USAGE_FLUSH_S)
    counted = sum(used(service, target).get("output_tokens", 0) for target in targets)
    others = [result for result in load.results if result.outcome is not Outcome.WHOLE]
    assert sent <= counted <= sent + 16 * len(others)
