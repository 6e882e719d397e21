"""Requests of other tenants run between one tenant's many large bodies."""

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from lorikeet.apis.chat.request import ChatRequest
from lorikeet.errors import InvalidInput, RateLimited
from lorikeet.gateway.body import LARGE_BYTES, MAX_WAITING_BYTES, LargeBodies
from tests.gateway.conftest import chat

MANY = 20
FIELDS = {f"field_{i}": {"type": "string"} for i in range(2000)}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": FIELDS}}
LARGE = json.dumps(chat(tools=[{"type": "function", "function": TOOL}])).encode()
SMALL = json.dumps(chat()).encode()


assert len(SMALL) < LARGE_BYTES < len(LARGE)


class Client:
    """A client whose body has arrived, and who stays connected until `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def read(
    bodies: LargeBodies, body: bytes, tenant: str, client: Client | None = None
) -> ChatRequest:
    request = (client or Client()).request
    return await bodies.parse_json(request, body, ChatRequest, tenant)


def parsed_in_order(*sent: tuple[str, bytes, str]) -> list[str]:
    """Return names of bodies, sent at once in this order, in the order in which they are parsed."""

    async def all_at_once() -> list[str]:
        bodies, order = LargeBodies(), list[str]()

        async def send(name: str, body: bytes, tenant: str) -> None:
            await read(bodies, body, tenant)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for each in sent:
                tasks.create_task(send(*each))
        return order

    return asyncio.run(all_at_once())


FLOOD = [(f"acme {i}", LARGE, "acme") for i in range(MANY)]


@pytest.mark.parametrize(
    "other", [("small", SMALL, "globex"), ("small", SMALL, "acme"), ("large", LARGE, "globex")]
)
def test_other_tenants_later_bodies_are_parsed_before_many_large_bodies(
    other: tuple[str, bytes, str],
) -> None:
    order = parsed_in_order(*FLOOD, other)
    assert {"acme 0", other[0]} == set(order[:2])


def test_large_bodies_of_a_tenant_are_parsed_in_order() -> None:
    assert parsed_in_order(*FLOOD) == [name for name, _, _ in FLOOD]


def test_the_pause_after_a_large_body_is_as_long_as_its_parse() -> None:
    async def shares() -> list[int]:
        bodies, loop = LargeBodies(), asyncio.get_running_loop()
        steps, ended = 0, list[int]()

        async def send() -> None:
            await read(bodies, LARGE, "acme")
            ended.append(steps)

        sending = [loop.create_task(send()) for _ in range(4)]
        while not all(task.done() for task in sending):
            steps += 1
            await asyncio.sleep(0)
        return [later - earlier for earlier, later in pairwise(ended)]

    # Steps of other tasks; one or two without a pause. A busy machine may use a pause elsewhere.
    assert any(min(asyncio.run(shares())) > 5 for _ in range(20))


def test_the_pause_grows_faster_than_a_long_parse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apart_s(parse_s: float) -> float:
        async def two() -> float:
            bodies, began_s = LargeBodies(), list[float]()

            def parse(*_: object) -> None:
                began_s.append(time.monotonic())
                until_s = time.thread_time() + parse_s
                while time.thread_time() < until_s:
                    pass

            monkeypatch.setattr("lorikeet.gateway.body.parse_json", parse)
            await asyncio.gather(read(bodies, LARGE, "acme"), read(bodies, LARGE, "acme"))
            return began_s[1] - began_s[0] - parse_s

        return asyncio.run(two())

    assert apart_s(0.02) >= 0.4
    assert min(apart_s(0.0005) for _ in range(5)) < 0.2


@pytest.mark.parametrize("bad", [b"{" * LARGE_BYTES, b"[" + b"0," * 70_000])
def test_the_next_large_body_is_parsed_after_a_refused_one(bad: bytes) -> None:
    async def after_refusal() -> ChatRequest:
        bodies = LargeBodies()
        with pytest.raises(InvalidInput):
            await read(bodies, bad, "acme")
        return await asyncio.wait_for(read(bodies, LARGE, "acme"), 30)

    assert asyncio.run(after_refusal()).model == "acme/support"


def test_the_body_of_a_client_that_left_while_it_waited_is_not_parsed() -> None:
    async def with_one_gone() -> list[ChatRequest | BaseException]:
        bodies, client = LargeBodies(), Client()
        bad = b"{" * LARGE_BYTES  # parsing it would raise another error
        reading = [read(bodies, LARGE, "acme"), read(bodies, bad, "acme", client)]
        tasks = [asyncio.create_task(each) for each in (*reading, read(bodies, LARGE, "acme"))]
        await asyncio.sleep(0)
        client.gone.set()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    first, gone, last = asyncio.run(with_one_gone())
    assert isinstance(gone, ClientDisconnect)
    assert isinstance(first, ChatRequest)
    assert isinstance(last, ChatRequest)


def test_a_request_cancelled_while_its_body_waits_delays_no_other() -> None:
    async def with_one_gone() -> list[ChatRequest]:
        bodies = LargeBodies()
        first, gone, last = (asyncio.create_task(read(bodies, LARGE, "acme")) for _ in range(3))
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.wait_for(asyncio.gather(first, last), 30)

    assert len(asyncio.run(with_one_gone())) == 2


def test_large_bodies_beyond_the_limit_are_refused_and_small_bodies_pass() -> None:
    large = SMALL.ljust(MAX_WAITING_BYTES // 8)

    async def answers() -> list[ChatRequest | BaseException]:
        bodies = LargeBodies()
        many = [read(bodies, large, "acme") for _ in range(10)]  # one holds the lock, 8 wait
        others = read(bodies, SMALL, "acme"), read(bodies, large, "globex")
        at_once = await asyncio.gather(*many, *others, return_exceptions=True)
        return [*at_once, await read(bodies, large, "acme")]  # the limit allows another

    *kept, last, small, other, later = asyncio.run(answers())
    assert all(isinstance(each, ChatRequest) for each in (*kept, small, other, later))
    assert isinstance(last, RateLimited)
    assert "64 MiB" in last.message
    assert "send fewer large bodies at once" in last.message
