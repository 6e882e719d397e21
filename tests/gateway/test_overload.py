"""A gateway whose replicas are too slow for its requests."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lorikeet.protocol.messages import Call
from lorikeet.tenancy import queue_time_estimator
from tests.gateway.conftest import Gateway, Items, chat, header, repeat, serving
from tests.gateway.test_bad_requests import CHAT, error_of

MAX_RUNNING = 4
EVERY_S = 0.1  # one request begins
MAX_QUEUE_S = 2.0
ENOUGH_S = 0.5


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(queue_time_estimator, "_ENOUGH_S", ENOUGH_S)
    with serving(tmp_path, max_running={"tiny": MAX_RUNNING}, max_queue_s=MAX_QUEUE_S) as gateway:
        turn = asyncio.Lock()

        async def slowly(call: Call) -> Items:
            yield header(call)
            async with turn:
                await asyncio.sleep(EVERY_S)
            yield replace(header(call), load_s=0.0)
            async for item in repeat(call):
                if isinstance(item, bytes):
                    yield item

        gateway.engines.replay = slowly
        yield gateway


def test_only_requests_that_would_wait_too_long_are_refused(slow: Gateway) -> None:
    refusals: list[tuple[float, httpx.Response]] = []

    async def flood() -> tuple[list[int], list[int]]:
        async with httpx.AsyncClient(timeout=20) as client:

            async def ask(tenant: str, stream: bool = True) -> int:
                headers = {"authorization": f"Bearer {slow.keys[tenant]}"}
                body, began_s = chat("tiny", stream=stream), time.monotonic()
                answer = await client.post(slow.url + CHAT, json=body, headers=headers)
                if answer.status_code != 200:
                    refusals.append((time.monotonic() - began_s, answer))
                return answer.status_code

            noisy, quiet = [], []
            for number in range(75):  # 25 a second; 10 can begin
                noisy.append(asyncio.create_task(ask("acme", stream=number % 2 == 0)))
                if number % 25 == 24:
                    quiet.append(asyncio.create_task(ask("globex")))
                await asyncio.sleep(0.04)
            return await asyncio.gather(*noisy), await asyncio.gather(*quiet)

    noisy, quiet = asyncio.run(flood())
    assert 10 < noisy.count(503) == len(refusals) < 60
    assert quiet == [200] * 3
    took_s = sorted(took_s for took_s, _ in refusals)
    assert took_s[len(took_s) // 2] < MAX_QUEUE_S
    for _, refusal in refusals:
        assert error_of(refusal, 503)["code"] == "overloaded"
        assert 1 <= int(refusal.headers["retry-after"]) <= MAX_QUEUE_S
    assert slow.post(CHAT, chat()).status_code == 200
