"""Batches on the real service, in which processes are killed: each line is answered once.

BATCH_LINES: lines of the batch during which each part is killed, 10,000 by default.
"""

import json
import os
import random
import signal
from typing import Any

import httpx
import openai
import pytest
import ray

from demo.fill_catalog import ADAPTERS
from tests.e2e.conftest import REPLICAS, Service
from tests.e2e.service_processes import actor_named, actors_named, engine_processes
from tests.waiting import eventually

MODEL = "quillon/reverse"
CHAT = "/v1/chat/completions"
KILLED_LINES = int(os.environ.get("BATCH_LINES", "10000"))


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    tenant = MODEL.partition("/")[0]
    assert (ADAPTERS / MODEL).exists()
    return openai.OpenAI(
        base_url=f"{service.url}/v1", api_key=service.tenant_keys[tenant], max_retries=20
    )


def text_of(count: int, max_tokens: int) -> bytes:
    requests = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": MODEL if number % 2 else "lorikeet-demo",
                "messages": [{"role": "user", "content": f"say {number}"}],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
        for number in range(count)
    ]
    return "\n".join(map(json.dumps, requests)).encode()


def make(client: openai.OpenAI, count: int, max_tokens: int = 8) -> str:
    file = client.files.create(file=("in.jsonl", text_of(count, max_tokens)), purpose="batch")
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
    batch_id = make(client, 40)
    for number in range(4):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"say {number}"}], max_tokens=8
        )
    results = results_of(client, batch_id, within_s=120)
    assert set(results) == set(map(str, range(40)))
    asked = {"messages": [{"role": "user", "content": "say 3"}], "max_tokens": 8, "temperature": 0}
    alone = client.chat.completions.create(model=MODEL, **asked)  # type: ignore[call-overload]
    body = results["3"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert body["service_tier"] == "flex"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_kills_lose_no_line_and_double_none(service: Service, client: openai.OpenAI) -> None:
    count, numbers = KILLED_LINES, random.Random(0)
    batch_id = make(client, count)
    done = 0
    for part in ("replica", "gateway", "controller", "engine", "gateway"):
        wanted = min(done + count // 12, count - 1)
        assert eventually(lambda w=wanted: completed(client, batch_id) >= w, within_s=900)
        kill(service, part, numbers)
        assert eventually(lambda: is_whole(service), within_s=120)
        done = completed(client, batch_id)
    results = results_of(client, batch_id, within_s=1800)
    assert set(results) == set(map(str, range(count)))
    assert {result["response"]["status_code"] for result in results.values()} == {200}


def completed(client: openai.OpenAI, batch_id: str) -> int:
    try:
        counts = client.batches.retrieve(batch_id).request_counts
    except openai.APIError:  # a gateway was killed
        return 0
    return counts.completed if counts else 0


def is_whole(service: Service) -> bool:
    try:
        return len(service.replicas()) == REPLICAS
    except httpx.HTTPError:  # no gateway, or one that is ending
        return False


def kill(service: Service, part: str, numbers: random.Random) -> None:
    if part in ("replica", "engine"):
        engine, replica = numbers.choice([*engine_processes(service).items()])
        os.kill(engine if part == "engine" else replica, signal.SIGKILL)
    else:
        ray.kill(actor_named(f"default#{part}#"), no_restart=False)
        assert eventually(lambda: actors_named(f"default#{part}#"), within_s=60)
