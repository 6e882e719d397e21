"""Batches on the real service, in which processes are killed: each line is answered once.

BATCH_LINES: lines of the batch during which each part is killed, 10,000 by default.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
import ray

from demo.fill_catalog import ADAPTERS
from tests.e2e.conftest import REPLICAS, Crowd, Service
from tests.e2e.service_processes import engine_processes, process_of
from tests.waiting import eventually

MODEL = "quillon/reverse"
CHAT = "/v1/chat/completions"
COUNTED = ("requests", "prompt_tokens", "output_tokens")
KILLED_LINES = int(os.environ.get("BATCH_LINES", "10000"))


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    tenant = MODEL.partition("/")[0]
    assert (ADAPTERS / MODEL).exists()
    return openai.OpenAI(
        base_url=f"{service.url}/v1", api_key=service.tenant_keys[tenant], max_retries=20
    )


def requests(count: int, max_tokens: int, model: str) -> list[dict[str, Any]]:
    """Return the requests of a batch: short chats of 1 to `max_tokens` tokens."""
    return [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"say {number}"}],
                "max_tokens": 1 + number % max_tokens,
                "temperature": 0,
            },
        }
        for number in range(count)
    ]


def make(client: openai.OpenAI, asked: list[dict[str, Any]]) -> str:
    text = "\n".join(map(json.dumps, asked)).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return made.id


def results_of(client: openai.OpenAI, batch_id: str, within_s: float) -> dict[str, Any]:
    """Wait for a batch's end; return its results by custom_id, of which each is there once."""
    ended = ("completed", "failed", "expired", "cancelled")
    assert eventually(lambda: client.batches.retrieve(batch_id).status in ended, within_s)
    batch = client.batches.retrieve(batch_id)
    assert batch.status == "completed", batch
    assert batch.error_file_id is None, client.files.content(batch.error_file_id).text[:2000]
    assert batch.output_file_id is not None
    lines = client.files.content(batch.output_file_id).text.splitlines()
    results = {result["custom_id"]: result for result in map(json.loads, lines)}
    assert len(results) == len(lines), "no line is there twice"
    return results


def test_openais_client_runs_a_batch_beside_other_requests(client: openai.OpenAI) -> None:
    batch_id = make(client, requests(40, 8, MODEL))
    for number in range(4):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"say {number}"}], max_tokens=8
        )
    results = results_of(client, batch_id, within_s=120)
    assert set(results) == set(map(str, range(40)))
    asked = {"messages": [{"role": "user", "content": "say 3"}], "max_tokens": 4, "temperature": 0}
    alone = client.chat.completions.create(model=MODEL, **asked)  # type: ignore[call-overload]
    body = results["3"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert body["service_tier"] == "flex"


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_kills_lose_no_line_and_double_none(service: Service, crowd: Crowd) -> None:
    """Kill each part by SIGKILL in the middle of one batch, and count each line's tokens.

    Lines that a killed gateway had answered but not committed are answered and counted again, or
    were not counted yet. All other parts cost no token, so that gateways are killed among the last
    lines, which have an adapter of their own.
    """
    count, numbers = KILLED_LINES, random.Random(0)
    first, last = crowd.adapters(2)
    exact = 7 * count // 10
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=first.key, max_retries=20)
    asked = requests(exact, 3, first.model) + requests(count, 3, last.model)[exact:]
    batch_id = make(client, asked)
    for place, part in enumerate(("replica", "engine", "controller"), 1):
        wait_for(client, batch_id, place * exact // 4)
        kill(service, part, numbers)
        assert eventually(lambda: is_whole(service), within_s=600), part
    assert eventually(lambda: used(client, first.model)["requests"] >= exact, within_s=3600)
    for _ in range(2):  # the second part of results has all that were answered before the first
        wait_for(client, batch_id, completed(client, batch_id) + 1)
    for _ in range(2):
        wait_for(client, batch_id, completed(client, batch_id) + count // 20)
        kill(service, "gateway", numbers)
        assert eventually(lambda: is_whole(service), within_s=600)
    assert completed(client, batch_id) < count, "all kills were in the middle"
    results = results_of(client, batch_id, within_s=3600)
    assert set(results) == {each["custom_id"] for each in asked}
    assert {result["response"]["status_code"] for result in results.values()} == {200}
    said = {model: Counter[str]() for model in (first.model, last.model)}
    for each in asked:
        answered = tokens_of(results[each["custom_id"]]["response"]["body"]["usage"])
        said[each["body"]["model"]] += answered + Counter(requests=1)
    assert used(client, first.model) == said[first.model]
    assert eventually(lambda: used(client, last.model)["requests"] >= 0.8 * (count - exact), 60)
    assert used(client, last.model)["requests"] <= 1.5 * (count - exact)
    for each in numbers.sample(asked, 20):
        body = results[each["custom_id"]]["response"]["body"]
        alone = client.chat.completions.create(**each["body"])
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
        assert tokens_of(body["usage"]) == tokens_of(alone.usage.model_dump())


def tokens_of(usage: dict[str, Any]) -> Counter[str]:
    """Return an answer's prompt and output tokens, as the tenant's usage names them."""
    return Counter(prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])


def used(client: openai.OpenAI, model: str) -> Counter[str]:
    """Return the requests and tokens that the service has counted for an adapter."""
    time.sleep(1)  # pause, as in completed()
    rows = client.get("/usage", cast_to=httpx.Response).json()["data"]
    (row,) = [row for row in rows if row["adapter"] == model] or [{}]
    return Counter({name: row.get(name, 0) for name in COUNTED})


def wait_for(client: openai.OpenAI, batch_id: str, lines: int) -> None:
    """Wait until so many lines have results in the store."""
    assert eventually(lambda: completed(client, batch_id) >= lines, within_s=3600)


def completed(client: openai.OpenAI, batch_id: str) -> int:
    time.sleep(1)  # pause: each look reads a dozen objects
    try:
        counts = client.batches.retrieve(batch_id).request_counts
    except openai.APIError:  # a gateway was killed
        return 0
    return counts.completed if counts else 0


def is_whole(service: Service) -> bool:
    """Return whether a gateway, a controller and all replicas answer."""
    try:
        return len(service.replicas()) == REPLICAS and all(
            map(process_of, ("gateway", "controller"))
        )
    except (httpx.HTTPError, ray.exceptions.RayError, AssertionError, ValueError):
        return False  # one is ending or has not begun


def kill(service: Service, part: str, numbers: random.Random) -> None:
    if part in ("replica", "engine"):
        engine, replica = numbers.choice([*engine_processes(service).items()])
        os.kill(engine if part == "engine" else replica, signal.SIGKILL)
    else:
        os.kill(process_of(part), signal.SIGKILL)
