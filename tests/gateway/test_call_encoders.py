"""Encoding of prompts in gateways: refusals, counts, and the time taken from other requests."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lorikeet.catalog.records import Scope
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.error_responses import Refused
from lorikeet.protocol.messages import Call, TokenIds
from lorikeet.text import tenant_threads
from lorikeet.text.prompts import PromptEncoder
from tests.gateway.conftest import Gateway, chat, demo_encoder
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.text.test_call_encoding import COMPLETION

SHORT = replace(COMPLETION, prompts=("once upon",))
LONG = replace(COMPLETION, prompts=("once upon a time " * 100,))
ASKING: dict[str, Callable[[str], dict[str, Any]]] = {
    "chat/completions": lambda text: chat("tiny", text),
    "completions": lambda text: {"model": "tiny", "prompt": text},
    "responses": lambda text: {"model": "tiny", "input": text},
    "responses/input_tokens": lambda text: {"model": "tiny", "input": text},
    "messages": lambda text: chat("tiny", text, max_tokens=9),
    "messages/count_tokens": lambda text: chat("tiny", text),
}


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "param"),
    [("chat/completions", "messages"), ("completions", "prompt"), ("responses", "input")],
)
def test_a_prompt_beyond_the_context_is_refused_before_a_replica_is_asked(
    gateway: Gateway, path: str, param: str, stream: bool
) -> None:
    for text in ("word " * 4096, "word " * 400_000):
        refused = gateway.post(f"/v1/{path}", {**ASKING[path](text), "stream": stream})
        error = error_of(refused, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")
    assert not gateway.engines.calls


def test_a_message_beyond_the_context_is_refused_in_anthropics_shape(gateway: Gateway) -> None:
    refused = gateway.post("/v1/messages", ASKING["messages"]("word " * 4096))
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert not gateway.engines.calls


def test_a_refused_prompt_takes_no_tokens_of_the_limits(gateway: Gateway) -> None:
    gateway.catalog.create_tenant("little", actor="test", tokens_per_min=6000, burst_s=600.0)
    gateway.keys["little"] = gateway.catalog.create_key("little", {Scope.INFER}, actor="test")[1]

    def left_after(text: str) -> int:
        gateway.post(CHAT, chat("tiny", text, max_tokens=1), tenant="little")
        short = gateway.post(CHAT, chat("tiny", "hi", max_tokens=1), tenant="little")
        return int(short.headers["x-ratelimit-remaining-tokens"])

    assert left_after("word " * 5000) >= left_after("hi") - 100


@pytest.mark.parametrize("path", ["messages/count_tokens", "responses/input_tokens"])
def test_tokens_are_counted_without_a_replica(gateway: Gateway, path: str) -> None:
    for text in ("hello there", "word " * 500):
        counted = gateway.post(f"/v1/{path}", ASKING[path](text))
        assert counted.status_code == 200, counted.text
        gateway.post(CHAT, chat("tiny", text))
        assert counted.json()["input_tokens"] == gateway.engines.encoded[-1].work.prompt_tokens
    assert not any(call.endpoint.counts for _, call in gateway.engines.calls)


def test_an_exception_of_a_tokenizer_reaches_no_client(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("secret insides")

    monkeypatch.setattr(demo_encoder(), "encode", fail)
    for text in ("hi", "hi " * 1000):
        failed = gateway.post(CHAT, chat("tiny", text))
        assert failed.status_code == 500
        assert "secret" not in failed.text


async def stays() -> Any:
    await asyncio.Event().wait()


def encoding(encoders: CallEncoders, call: Call, receive: Receive = stays) -> Any:
    return asyncio.create_task(encoders.encode("tiny", call, 4096, receive))


def test_a_prompt_that_cannot_fit_is_refused_without_stopping_others() -> None:
    async def longest_gap_s(text: str) -> float:
        encoders = CallEncoders({"tiny": demo_encoder()})
        refusing = encoding(encoders, replace(COMPLETION, prompts=(text,)))
        gaps, last = [0.0], time.monotonic()
        while not refusing.done():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
        with pytest.raises(Refused) as raised:
            await refusing
        assert raised.value.code == "context_length_exceeded"
        return max(gaps)

    for text in ("word " * 300_000, "word " * 4_000):
        assert min(asyncio.run(longest_gap_s(text)) for _ in range(4)) < 0.5


class Held(PromptEncoder):
    """Encoder that holds some calls until a test lets them go on."""

    def __init__(self, holds: Callable[[Call], bool]) -> None:
        self._holds, self.held, self.may_go_on = holds, list[Call](), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(demo_encoder(), name)

    def encode(self, call: Call, max_context: int) -> tuple[TokenIds, ...]:
        if self._holds(call):
            self.held.append(call)
            assert self.may_go_on.wait(30)
        return demo_encoder().encode(call, max_context)


def test_a_short_prompt_does_not_wait_until_long_prompts_are_encoded() -> None:
    held = Held(lambda call: call.prompts == LONG.prompts)

    async def scenario() -> None:
        encoders = CallEncoders({"tiny": held})
        waiting = [encoding(encoders, replace(LONG, tenant=f"t{i}")) for i in range(4)]
        async with asyncio.timeout(20):
            while len(held.held) < tenant_threads._THREADS:
                await asyncio.sleep(0.01)
            assert (await encoding(encoders, SHORT)).work.prompt_tokens
        assert not any(task.done() for task in waiting)
        held.may_go_on.set()
        assert len(await asyncio.gather(*waiting)) == 4

    asyncio.run(scenario())


def test_a_long_prompt_whose_client_has_left_is_not_encoded() -> None:
    held = Held(lambda call: call.prompts == LONG.prompts)

    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        encoders = CallEncoders({"tiny": held})
        waiting = [encoding(encoders, LONG) for _ in range(2)]
        with pytest.raises(ClientDisconnect):
            await encoding(encoders, replace(LONG, echo=True), leaves)
        held.may_go_on.set()
        await asyncio.gather(*waiting)
        assert (await encoding(encoders, LONG)).work.prompt_tokens
        assert not any(call.echo for call in held.held)

    asyncio.run(scenario())


def test_one_tenants_long_prompts_leave_a_thread_to_another_tenant() -> None:
    held = Held(lambda call: call.tenant == "flood")

    async def scenario() -> None:
        encoders = CallEncoders({"tiny": held})
        waiting = [encoding(encoders, replace(LONG, tenant="flood")) for _ in range(6)]
        await asyncio.sleep(0)
        for left in waiting[:3]:  # whose threads go on all the same
            left.cancel()
        async with asyncio.timeout(20):
            assert (await encoding(encoders, LONG)).work.prompt_tokens
        held.may_go_on.set()
        assert len(await asyncio.gather(*waiting[3:])) == 3

    asyncio.run(scenario())
