"""A replica goes on with answers that another has begun, as the other would have."""

import asyncio
import json
from concurrent.futures import Future
from dataclasses import replace

import pytest

from demo.fill_catalog import fill_catalog
from demo.tasks import TASKS
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    Format,
    Refusal,
    RunningUsage,
    ToolUse,
)
from lorikeet.protocol.response_stream import outputs_of, tokens_in
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.prompts import encode_call
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import EngineOverloaded
from lorikeet_engine.request import SamplingParams, SchedulingParams
from tests.serving.local_gateway import local_gateway

BASE = "lorikeet-demo"
TASK = TASKS[0]
CHAT = Call(
    request_id="r",
    endpoint=Endpoint.CHAT,
    created=0,
    tenant=TASK.tenant,
    model=TASK.model,
    adapter=None,
    messages=({"role": "user", "content": TASK.example.prompt},),
    max_tokens=40,
    sampling=SamplingParams(temperature=0.0, ignore_eos=True),
    stream=True,
    include_usage=True,
    scheduling=SchedulingParams(tenant=TASK.tenant),
)
DRAWN = SamplingParams(temperature=1.0, seed=3, top_p=0.95, frequency_penalty=0.3, ignore_eos=True)
SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["long enough", "or longer"]}, "b": \
{"type": "array", "items": {"type": "integer"}, "maxItems": 9}}, "required": ["a", "b"]}'
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "listen")
)
CALLS = {
    "greedy": CHAT,
    "drawn": replace(CHAT, sampling=DRAWN, n=2),
    "completions": replace(
        CHAT,
        endpoint=Endpoint.COMPLETIONS,
        messages=(),
        prompts=("once upon", "a"),
        sampling=DRAWN,
        n=2,
        echo=True,
        stop=("e",),
    ),
    "response": replace(CHAT, endpoint=Endpoint.RESPONSES, sampling=DRAWN),
    "message": replace(CHAT, endpoint=Endpoint.MESSAGES, sampling=DRAWN, stop=("zz", "q")),
    "schema": replace(CHAT, format=Format(SCHEMA), sampling=SamplingParams(seed=4)),
    "tools": replace(CHAT, tools=ToolUse(TOOLS, ("look", "listen")), max_tokens=60),
    "whole": replace(CHAT, stream=False, max_tokens=200, sampling=DRAWN),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("resumed")
    given = {
        "LORIKEET_CATALOG": str(root / "catalog"),
        "LORIKEET_CACHE_DIR": str(root / "cache"),
        "LORIKEET_USAGE_FLUSH_S": "0.2",
    }
    settings = Settings.from_env(given)
    fill_catalog(settings, root)
    return settings


@pytest.fixture
def ref(settings):
    state = CatalogReader(open_store(settings.catalog)).refresh()
    return state.resolve(TASK.model, TASK.tenant)


async def parts_of(gateway, encoded):
    """Return an answer's messages: each one's items, and the log up to its end."""
    log, parts = bytearray(), []
    async for item in gateway.stream_encoded(encoded, log):
        parts.append((item, bytes(log)))
    return parts


def bytes_of(parts):
    return b"".join(item for item, _ in parts if isinstance(item, bytes))


def shown(call, answer):
    """Return what a client is sure to see: all bytes of a single unconstrained choice.

    Choices take turns by chance, and a grammar's forced tokens come in parts by chance.
    """
    if call.n == 1 and call.format is call.tools is None:
        return answer
    choices = {}
    for event in answer.decode().split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            told = choices.setdefault(choice["index"], [])
            delta = choice.get("delta", choice)
            told += delta.get("content") or choice.get("text") or choice["finish_reason"] or ""
            for called in delta.get("tool_calls", ()):
                told += called.get("id", "") + called["function"]["arguments"]
    return choices


def usage_of(parts):
    (usage,) = [item for item, _ in parts if isinstance(item, FinalUsage)]
    return replace(usage, timings=())


def run(settings, scenario):
    async def inside():
        replica = Replica("r0", BASE, settings)
        try:
            async with local_gateway(replica) as gateway:
                return await asyncio.wait_for(scenario(replica, gateway), 120)
        finally:
            replica.close()

    return asyncio.run(inside())


def test_the_answer_goes_on_after_each_of_its_messages(settings, ref):
    async def scenario(replica, gateway):
        for number, (name, call) in enumerate(CALLS.items()):
            adapter = ref if number % 2 else None
            asked = replace(call, request_id=name, adapter=adapter)
            encoded = encode_call(asked, replica._encoder, 4096)
            whole = await parts_of(gateway, encoded)
            logs = sorted({log for _, log in whole if log}, key=len)[:-1]
            assert logs, name
            for attempt, log in enumerate(logs[:: max(1, len(logs) // 2)], 1):
                made = replace(encoded, attempt=attempt, log=log, made_tokens=tokens_in(log))
                rest = await parts_of(gateway, made)
                before = [(item, at) for item, at in whole if len(at) <= len(log)]
                got, expected = bytes_of(before) + bytes_of(rest), bytes_of(whole)
                assert shown(call, got) == shown(call, expected), (name, attempt)
                assert usage_of(rest) == usage_of(whole)
                assert isinstance(rest[0][0], AnswerHeader)
                assert rest[0][0].is_first

    run(settings, scenario)


def test_running_usage_counts_the_tokens_of_lost_replicas_though_the_engine_is_busy(settings):
    long = replace(CHAT, max_tokens=150)

    async def scenario(replica, gateway):
        submit, overloaded = replica._engine.submit, Future()
        overloaded.set_exception(EngineOverloaded("busy", retry_after_s=1.0))
        refused = [overloaded]
        encoded = encode_call(long, replica._encoder, 4096)
        whole = await parts_of(gateway, encoded)
        log = next(log for _, log in whole if tokens_in(log) > 70)
        replica._engine.submit = lambda asked: refused.pop() if refused else submit(asked)
        rest = await parts_of(gateway, replace(encoded, attempt=1, log=log))
        assert not refused
        running = [item for item, _ in rest if isinstance(item, RunningUsage)]
        made = [item.completion_tokens for item in running]
        assert made == list(range(tokens_in(log) + 16, 150, 16))
        assert {item.prompt_tokens for item in running} == {usage_of(rest).prompt_tokens}

    run(settings, scenario)


def test_an_answer_whose_version_is_gone_is_refused_by_name(settings):
    gone = AdapterRef(TASK.tenant, "gone", 1, "0" * 64)

    async def scenario(replica, gateway):
        encoded = encode_call(CHAT, replica._encoder, 4096)
        log = max((log for _, log in await parts_of(gateway, encoded)), key=len)
        (first, *_) = outputs_of(log, "r")
        assert first.token_ids
        cut = next(log for _, log in await parts_of(gateway, replace(encoded, attempt=2)) if log)
        asked = replace(encoded, call=replace(encoded.call, adapter=gone), attempt=1, log=cut)
        (*_, (refusal, _)) = await parts_of(gateway, asked)
        assert isinstance(refusal, Refusal)
        assert refusal.code == "adapter_load_failed"
        assert "gone" in refusal.message

    run(settings, scenario)
