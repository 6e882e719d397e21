"""Batches on the real service, in which processes are killed: each line is answered once.

BATCH_LINES: lines of the batch during which each part is killed, 10,000 by default.
"""

import json
import os
import random
import signal
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
KILLED_LINES = int(os.environ.get("BATCH_LINES", "10000"))


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    tenant = MODEL.partition("/")[0]
    assert (ADAPTERS / MODEL).exists()
    return openai.OpenAI(
        base_url=f"{service.url}/v1", api_key=service.tenant_keys[tenant], max_retries=20
    )


def text_of(count: int, max_tokens: int, adapter: str) -> bytes:
    requests = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": adapter if number % 2 else "lorikeet-demo",
                "messages": [{"role": "user", "content": f"say {number}"}],
                "max_tokens": 1 + number % max_tokens,
                "temperature": 0,
            },
        }
        for number in range(count)
    ]
    return "\n".join(map(json.dumps, requests)).encode()


def make(client: openai.OpenAI, count: int, max_tokens: int, adapter: str) -> str:
    """Make a batch of chats, half of them with an adapter, of up to `max_tokens` tokens each."""
    text = text_of(count, max_tokens, adapter)
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
    batch_id = make(client, 40, 8, MODEL)
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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "parts",
    [("replica", "engine", "controller", "engine", "replica"), ("gateway", "gateway")],
    ids=["engines", "gateways"],
)
def test_kills_lose_no_line_and_double_none(
    service: Service, crowd: Crowd, parts: tuple[str, ...]
) -> None:
    """Kill parts by SIGKILL, each in the middle of the batch; the rest of the lines wait or go on.

    A killed gateway's lines that were answered but not committed are answered, and counted, again;
    all other parts cost no token.
    """
    count, numbers = KILLED_LINES, random.Random(0)
    (target,) = crowd.adapters(1)
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=target.key, max_retries=20)
    before = used(client)
    batch_id = make(client, count, 3, target.model)
    for place, part in enumerate(parts, 1):
        wanted = place * count // (len(parts) + 1)
        assert eventually(lambda w=wanted: completed(client, batch_id) >= w, within_s=1500)
        kill(service, part, numbers)
        assert eventually(lambda: is_whole(service), within_s=300), part
    assert completed(client, batch_id) < count, "all kills were in the middle"
    results = results_of(client, batch_id, within_s=1500)
    assert set(results) == set(map(str, range(count)))
    assert {result["response"]["status_code"] for result in results.values()} == {200}
    said = Counter(requests=count)
    for result in results.values():
        said.update(tokens_of(result["response"]["body"]["usage"]))
    if "gateway" not in parts:
        assert eventually(lambda: used(client) - before == said, within_s=20), used(client) - before
    twice = (used(client) - before)["requests"] - count
    assert abs(twice) <= len(parts) * count / 20
    for number in numbers.sample(range(count), 20):
        asked = json.loads(text_of(count, 3, target.model).splitlines()[number])["body"]
        alone = client.chat.completions.create(**asked)
        body = results[str(number)]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
        assert tokens_of(body["usage"]) == tokens_of(alone.usage.model_dump())


def tokens_of(usage: dict[str, Any]) -> Counter[str]:
    """Return an answer's prompt and output tokens, as the tenant's usage names them."""
    return Counter(prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])


def used(client: openai.OpenAI) -> Counter[str]:
    """Return the requests and tokens that the service has counted for the client's tenant."""
    rows = client.get("/usage", cast_to=httpx.Response).json()["data"]
    names = ("requests", "prompt_tokens", "output_tokens")
    return Counter({name: sum(row[name] for row in rows) for name in names})


def completed(client: openai.OpenAI, batch_id: str) -> int:
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
