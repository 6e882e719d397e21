"""Examples for OpenAI's Python client, changed only in address, key and models.

The demo's models have no general knowledge, so tests check only the form of their answers. One
model writes down orders as JSON, and its answers must be right.
"""

import asyncio
import json
import math
from enum import StrEnum

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from demo.tasks import TASKS

BASE = "lorikeet-demo"
INTAKE = next(task for task in TASKS if task.model == "kestrel/intake")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
    },
}
HELLO = [
    {"role": "developer", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello!"},
]


@pytest.fixture
def client(service) -> OpenAI:
    return service.client(INTAKE.tenant)


@pytest.fixture
def async_client(service) -> AsyncOpenAI:
    key = service.tenant_keys[INTAKE.tenant]
    return AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=60)


def test_basic(client):
    completion = client.chat.completions.create(model=BASE, messages=HELLO)
    assert completion.choices[0].message.content
    assert completion.choices[0].finish_reason == "stop"
    assert completion._request_id


def test_streaming(client):
    completion = client.chat.completions.create(model=BASE, messages=HELLO, stream=True)
    deltas = [chunk.choices[0].delta for chunk in completion]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas)


def test_the_stream_helper(client):
    with client.chat.completions.stream(model=BASE, messages=HELLO) as stream:
        kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert stream.get_final_completion().choices[0].message.content


def test_async_and_async_streaming(async_client):
    async def main() -> None:
        async with async_client as client:
            whole = await client.chat.completions.create(
                messages=[{"role": "user", "content": "Say this is a test"}],
                model=BASE,
                temperature=0,
            )
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": "Say this is a test"}],
                model=BASE,
                temperature=0,
                stream=True,
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content

    asyncio.run(main())


def test_functions(client):
    completion = client.chat.completions.create(
        model=BASE,
        messages=[{"role": "user", "content": "What's the weather like in Boston today?"}],
        tools=[WEATHER],
        tool_choice="auto",
        max_tokens=40,
    )
    assert completion.choices[0].finish_reason in ("stop", "length", "tool_calls")


def get_weather(latitude: float, longitude: float) -> float:
    return latitude + longitude


def test_a_tools_round_trip(client):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get current temperature for provided coordinates in celsius.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "latitude": {"type": "number"},
                        "longitude": {"type": "number"},
                    },
                    "required": ["latitude", "longitude"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
        }
    ]
    messages = [{"role": "user", "content": "What's the weather like in Paris today?"}]
    completion = client.chat.completions.create(
        model=BASE,
        messages=messages,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.choices[0].message.content is None
    tool_call = completion.choices[0].message.tool_calls[0]
    args = json.loads(tool_call.function.arguments)
    result = get_weather(args["latitude"], args["longitude"])

    messages.append(completion.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": str(result)})
    completion_2 = client.chat.completions.create(model=BASE, messages=messages, tools=tools)
    assert completion_2.usage.prompt_tokens > completion.usage.prompt_tokens


def test_streaming_tool_calls(client):
    choice = {"type": "function", "function": {"name": "take_order"}}
    tools = [openai.pydantic_function_tool(Order, name="take_order")]
    messages = [{"role": "user", "content": INTAKE.example.prompt}]
    asked = {"model": INTAKE.model, "messages": messages, "tools": tools, "tool_choice": choice}
    stream = client.chat.completions.create(**asked, temperature=0, stream=True)
    final_tool_calls = {}
    pieces = 0
    for chunk in stream:
        for tool_call in chunk.choices[0].delta.tool_calls or []:
            index = tool_call.index
            if index not in final_tool_calls:
                final_tool_calls[index] = tool_call
            final_tool_calls[index].function.arguments += tool_call.function.arguments
            pieces += 1
    assert list(final_tool_calls) == [0]
    assert final_tool_calls[0].function.name == "take_order"
    assert Order.model_validate_json(final_tool_calls[0].function.arguments)
    assert pieces > 5
    parsed = client.chat.completions.parse(**asked, temperature=0)
    call = parsed.choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Order)
    assert call.function.arguments == final_tool_calls[0].function.arguments


def test_responses_with_and_without_streaming(client):
    asked = {
        "model": BASE,
        "instructions": "You are a coding assistant that talks like a pirate.",
        "input": "Hello!",
        "temperature": 0,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    assert stream.get_final_response().output_text == whole.output_text
    assert whole.output_text


def test_a_response_of_an_adapter_is_parsed(client):
    parsed = client.responses.parse(
        model=INTAKE.model, input=INTAKE.example.prompt, text_format=Order, temperature=0
    )
    assert parsed.output_parsed == Order(name="Mira", amount=12, city=City.lyon)


def test_json_mode(client):
    response = client.chat.completions.create(
        model=INTAKE.model,
        messages=[
            {"role": "system", "content": "You are a helpful assistant designed to output JSON."},
            {"role": "user", "content": INTAKE.example.prompt},
        ],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    assert isinstance(json.loads(response.choices[0].message.content), dict)


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


def test_structured_outputs(client):
    completion = client.chat.completions.parse(
        model=BASE,
        messages=[
            {"role": "system", "content": "Extract the event information."},
            {
                "role": "user",
                "content": "Alice and Bob are going to a science fair on Friday.",
            },
        ],
        response_format=CalendarEvent,
        temperature=0,
    )
    event = completion.choices[0].message.parsed
    assert isinstance(event, CalendarEvent)


class City(StrEnum):
    lyon = "Lyon"
    paris = "Paris"


class Order(BaseModel):
    name: str
    amount: int
    city: City


def test_structured_outputs_of_an_adapter_are_right(client):
    completion = client.chat.completions.parse(
        model=INTAKE.model,
        messages=[{"role": "user", "content": INTAKE.example.prompt}],
        response_format=Order,
        temperature=0,
    )
    assert completion.choices[0].message.parsed == Order(name="Mira", amount=12, city=City.lyon)


def test_streaming_structured_outputs(client):
    with client.chat.completions.stream(
        model=INTAKE.model,
        messages=[{"role": "user", "content": INTAKE.example.prompt}],
        response_format=Order,
        temperature=0,
    ) as stream:
        for event in stream:
            if event.type == "content.done":
                assert event.parsed.city is City.lyon
    assert stream.get_final_completion().choices[0].message.parsed.amount == 12


def test_an_unsupported_schema_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=BASE,
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "odd", "schema": {"type": "no such type"}},
            },
        )
    assert caught.value.code == "invalid_value"
    assert caught.value.param == "response_format"


def test_logprobs(client):
    completion = client.chat.completions.create(
        model=BASE, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=5
    )
    choice = completion.choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 2
        likeliest, second = token.top_logprobs
        assert 0 >= likeliest.logprob >= second.logprob
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001


def test_penalties_and_biases(client):
    never = {str(6 + ord("e")): -100}
    completion = client.chat.completions.create(
        model=BASE, messages=HELLO, logit_bias=never, presence_penalty=0.5, frequency_penalty=-0.5
    )
    assert "e" not in completion.choices[0].message.content


def test_legacy_completions(client):
    prompt = "Once upon a"
    completion = client.completions.create(
        model=BASE, prompt=prompt, max_tokens=7, temperature=0, logprobs=3, n=2
    )
    for choice in completion.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset == list(range(7))
        assert all(len(top) in (3, 4) for top in choice.logprobs.top_logprobs)
    echoed = client.completions.create(
        model=BASE, prompt=prompt, max_tokens=7, temperature=0, echo=True
    )
    assert echoed.choices[0].text == prompt + completion.choices[0].text
    scored = client.completions.create(
        model=BASE, prompt=echoed.choices[0].text, max_tokens=0, echo=True, logprobs=3
    )
    told, sampled = scored.choices[0].logprobs, completion.choices[0].logprobs
    assert told.token_logprobs[0] is None
    assert told.tokens[-7:] == sampled.tokens
    assert told.token_logprobs[-7:] == pytest.approx(sampled.token_logprobs, abs=1e-4)
    stream = client.completions.create(
        model=BASE, prompt=prompt, max_tokens=7, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == completion.choices[0].text


def test_usage_counts_cached_tokens(client):
    asked = {"model": BASE, "prompt": "cached " * 40, "max_tokens": 1}
    first = client.completions.create(**asked).usage
    assert first.prompt_tokens_details.cached_tokens in range(first.prompt_tokens)
    *_, last = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.prompt_tokens == first.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens in range(first.prompt_tokens)


def test_models(client):
    models = client.models.list()
    assert {BASE, INTAKE.model} <= {model.id for model in models}
    model = client.models.retrieve(INTAKE.model)
    assert (model.id, model.object) == (INTAKE.model, "model")


def test_errors(client, service):
    with pytest.raises(openai.AuthenticationError) as unknown:
        OpenAI(base_url=f"{service.url}/v1", api_key="sk-none", max_retries=0).models.list()
    assert unknown.value.status_code == 401
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5.5", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=BASE, messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    assert len(bad.value.request_id) == 32


def test_too_many_requests(client, service):
    limited = {"tenant": "hasty", "requests_per_min": 1}
    service.admin("POST", "/tenants", json=limited).raise_for_status()
    key = service.admin("POST", "/tenants/hasty/keys", json={}).raise_for_status().json()["key"]
    hasty = OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)

    def hurry() -> None:
        for _ in range(5):  # the number that pass depends on the limit
            hasty.chat.completions.create(model=BASE, messages=HELLO, max_tokens=1)

    with pytest.raises(openai.RateLimitError) as refused:
        hurry()
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_timeouts(client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).chat.completions.create(model=BASE, messages=HELLO)


def test_raw_responses(client):
    response = client.chat.completions.with_raw_response.create(model=BASE, messages=HELLO)
    assert response.headers["x-request-id"]
    completion = response.parse()
    assert completion.choices[0].message.content
    with client.chat.completions.with_streaming_response.create(
        model=BASE, messages=HELLO
    ) as streamed:
        assert json.loads("".join(streamed.iter_lines()))["object"] == "chat.completion"
