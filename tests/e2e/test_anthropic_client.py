"""Examples for Anthropic's Python client, changed only in address, key and models.

The demo's models have no general knowledge, so tests check only the form of their answers. One
model writes down orders as JSON, and its answers must be right.
"""

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from demo.tasks import TASKS
from tests.e2e.conftest import Service

anthropic = pytest.importorskip("anthropic")

BASE = "lorikeet-demo"
INTAKE = next(task for task in TASKS if task.model == "kestrel/intake")
ORDER = [{"role": "user", "content": INTAKE.example.prompt}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "enum": ["San Francisco, CA", "Paris"]},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "What is the weather like in San Francisco?"}
FORCED = {"type": "tool", "name": "get_weather"}
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(service: Service) -> Any:
    key = service.tenant_keys[INTAKE.tenant]
    return anthropic.Anthropic(base_url=service.url, api_key=key, max_retries=0, timeout=60)


def test_an_adapter_answers_with_and_without_streaming(client: Any) -> None:
    asked = {"model": INTAKE.model, "max_tokens": 200, "messages": ORDER, **GREEDY}
    whole = client.messages.create(**asked)
    assert whole.content[0].text == INTAKE.example.answer
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == INTAKE.example.answer
    streamed = stream.get_final_message()
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=INTAKE.model, messages=ORDER)
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_the_async_client_is_answered(service: Service) -> None:
    async def main() -> str:
        key = service.tenant_keys[INTAKE.tenant]
        async with anthropic.AsyncAnthropic(base_url=service.url, auth_token=key) as client:
            asked = {"model": INTAKE.model, "max_tokens": 200, "messages": ORDER, **GREEDY}
            async with client.messages.stream(**asked) as stream:
                return await stream.get_final_text()

    assert asyncio.run(main()) == INTAKE.example.answer


def test_the_stop_reason_tells_a_stop_sequence_from_max_tokens(client: Any) -> None:
    asked = {"model": INTAKE.model, "messages": ORDER, **GREEDY}
    stopped = client.messages.create(max_tokens=200, stop_sequences=[","], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ",")
    assert stopped.content[0].text == INTAKE.example.answer.partition(",")[0]
    cut_off = client.messages.create(max_tokens=3, **asked)
    assert (cut_off.stop_reason, cut_off.usage.output_tokens) == ("max_tokens", 3)


def test_an_answer_continues_an_assistant_prefill(client: Any) -> None:
    begun, rest = INTAKE.example.answer[:8], INTAKE.example.answer[8:]
    turns = [*ORDER, {"role": "assistant", "content": begun}]
    whole = client.messages.create(model=INTAKE.model, max_tokens=200, messages=turns, **GREEDY)
    assert whole.content[0].text == rest


def test_a_tool_is_called_and_its_result_is_used(client: Any) -> None:
    asked = {"model": BASE, "max_tokens": 200, "tools": [WEATHER], "extra_body": {"top_k": 40}}
    first = client.messages.create(messages=[QUESTION], tool_choice=FORCED, **asked)
    (used,) = first.content
    assert (first.stop_reason, used.name) == ("tool_use", "get_weather")
    assert used.input["location"] in WEATHER["input_schema"]["properties"]["location"]["enum"]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "15 degrees"}
    turns = [
        QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(messages=turns, **asked)
    assert second.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=BASE, messages=turns, tools=[WEATHER])
    usage = second.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_the_input_of_a_tool_is_streamed(client: Any) -> None:
    asked = {"model": BASE, "max_tokens": 200, "tools": [WEATHER], "tool_choice": FORCED}
    parts = []
    with client.messages.stream(messages=[QUESTION], **asked) as stream:
        parts += [event.partial_json for event in stream if event.type == "input_json"]
        (used,) = stream.get_final_message().content
    assert len(parts) > 2
    assert json.loads("".join(parts)) == used.input


def test_an_answer_follows_a_schema(client: Any) -> None:
    class Parcel(BaseModel):
        city: str
        fragile: bool

    message = client.messages.parse(
        model=BASE, max_tokens=400, messages=[QUESTION], output_format=Parcel
    )
    if message.stop_reason == "end_turn":  # the demo model may exceed max_tokens
        assert isinstance(message.parsed_output, Parcel)


def test_a_prompt_that_is_too_long_is_refused_as_a_bad_request(client: Any) -> None:
    long = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=BASE, max_tokens=5, messages=long)
