"""LiteLLM: completions, streams, tools, formats and responses under three of its prefixes."""

import asyncio
import json
from typing import Any

import litellm
import pytest
from orders import ANTHROPIC_URL, KEY, MODEL, ORDER, ORDERS_MODEL, PROMPT, URL, Order

MESSAGES = [{"role": "user", "content": "Hey, how's it going?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "enum": ["Boston, MA"]}},
            "required": ["location"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
ADDRESSES = {"openai": URL, "hosted_vllm": URL, "anthropic": ANTHROPIC_URL}


def asked(provider: str, model: str = MODEL) -> dict[str, Any]:
    return {"model": f"{provider}/{model}", "api_base": ADDRESSES[provider], "api_key": KEY}


def location(call: Any) -> str:
    """Return a call's argument; hosted_vllm/ drops additionalProperties, so there may be others."""
    return json.loads(call.function.arguments)["location"]


every_provider = pytest.mark.parametrize("provider", ADDRESSES)
openai_like = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


@every_provider
def test_a_completion(provider: str) -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=50, **asked(provider))
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


@every_provider
def test_a_stream(provider: str) -> None:
    stream = litellm.completion(messages=MESSAGES, stream=True, max_tokens=50, **asked(provider))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@every_provider
def test_an_async_stream(provider: str) -> None:
    async def main() -> list[Any]:
        stream = await litellm.acompletion(
            messages=MESSAGES, stream=True, max_tokens=50, **asked(provider)
        )
        return [chunk async for chunk in stream]

    chunks = asyncio.run(main())
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@every_provider
def test_a_tool_is_called_and_its_result_is_sent_back(provider: str) -> None:
    answer = litellm.completion(messages=MESSAGES, **FORCED, **asked(provider))
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert location(call) == "Boston, MA"
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "5"}
    again = litellm.completion(
        messages=[*MESSAGES, message, result], tools=[WEATHER], max_tokens=50, **asked(provider)
    )
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


@openai_like
def test_a_streamed_call_is_rebuilt(provider: str) -> None:
    stream = litellm.completion(messages=MESSAGES, stream=True, **FORCED, **asked(provider))
    message = litellm.stream_chunk_builder(list(stream), messages=MESSAGES).choices[0].message
    assert location(message.tool_calls[0]) == "Boston, MA"


@every_provider
def test_a_formatted_answer_of_a_fine_tune_is_right(provider: str) -> None:
    prompt = [{"role": "user", "content": PROMPT}]
    answer = litellm.completion(
        messages=prompt, response_format=Order, temperature=0, **asked(provider, ORDERS_MODEL)
    )
    order = Order.model_validate_json(answer.choices[0].message.content)
    if provider != "anthropic":  # LiteLLM turns a schema into a tool there
        assert order == ORDER


@openai_like
def test_a_text_completion(provider: str) -> None:
    once = {"prompt": "Once upon a", "max_tokens": 10, "temperature": 0}
    whole = litellm.text_completion(**once, **asked(provider))
    stream = litellm.text_completion(**once, stream=True, **asked(provider))
    streamed = "".join(chunk.choices[0].text or "" for chunk in stream)
    assert streamed == whole.choices[0].text


@openai_like
def test_a_response(provider: str) -> None:
    answer = litellm.responses(input="Tell me", max_output_tokens=50, **asked(provider))
    assert answer.output[0].content[0].text
    events = litellm.responses(
        input="Tell me", max_output_tokens=50, stream=True, **asked(provider)
    )
    assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")


@openai_like
def test_errors_are_raised_as_litellms_classes(provider: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **asked(provider, "none"))
    long = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **asked(provider))
