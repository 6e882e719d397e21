"""/v1/responses through HTTP with OpenAI's client: requests, answers and refusals."""

from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from lorikeet.apis.responses.answer import ResponseEventStream, response_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Format, Refusal, StreamItem
from lorikeet.text.choice import Choice, Ending
from tests.apis.test_chat_answer import CALLS
from tests.gateway.conftest import Gateway, header
from tests.gateway.test_bad_requests import error_of

MODEL = "acme/support"
RESPONSES = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}


async def call_tools(call: Call) -> AsyncGenerator[StreamItem, None]:
    yield header(call)
    usage = FinalUsage(5, 3, 7)
    if call.stream:
        events = ResponseEventStream(call)
        yield events.delta(0, "", Ending.TOOL_CALLS, CALLS[:3]) + events.end(usage)
    else:
        yield response_body(call, Choice("", Ending.TOOL_CALLS, CALLS[:3]), usage)


async def fail_in_mid_stream(call: Call) -> AsyncGenerator[StreamItem, None]:
    yield header(call)
    yield ResponseEventStream(call).delta(0, "so far")
    yield Refusal("generation_failed", "the step failed")


def test_a_text_is_answered_and_nothing_is_stored(gateway: Gateway) -> None:
    answer = gateway.openai().responses.create(
        model=MODEL, input="Tell me a story", instructions="Be brief.", store=True
    )
    assert (answer.output_text, answer.status) == ("Tell me a story", "completed")
    assert (answer.store, answer.instructions) == (False, "Be brief.")
    assert answer.usage is not None
    assert answer.usage.input_tokens == 4
    call = gateway.engines.last
    assert call.endpoint is Endpoint.RESPONSES
    assert [dict(m) for m in call.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me a story"},
    ]


def test_a_stream_ends_with_the_whole_response(gateway: Gateway) -> None:
    client = gateway.openai()
    with client.responses.stream(model=MODEL, input="one two") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "one two "
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    created = client.responses.create(model=MODEL, input="one two", stream=True)
    assert [event.sequence_number for event in created] == list(range(len(kinds)))


def test_functions_are_called_and_their_outputs_sent_back(gateway: Gateway) -> None:
    gateway.engines.replay = call_tools
    client = gateway.openai()
    asked: list[Any] = [{"role": "user", "content": "How is Paris?"}]
    first = client.responses.create(model=MODEL, input=asked, tools=[WEATHER])
    (called,) = first.output
    assert called.type == "function_call"
    with client.responses.stream(model=MODEL, input=asked, tools=[WEATHER]) as stream:
        streamed = stream.get_final_response().output[0]
    assert streamed.type == "function_call"
    assert streamed.arguments == called.arguments
    outputs = [{"type": "function_call_output", "call_id": called.call_id, "output": "sunny"}]
    client.responses.create(model=MODEL, input=[*asked, *first.output, *outputs], tools=[WEATHER])
    user, assistant, tool = (dict(message) for message in gateway.engines.last.messages)
    assert user["content"] == "How is Paris?"
    assert assistant["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"place": "Paris"},
    }
    assert tool == {"role": "tool", "content": "sunny", "tool_call_id": "call00001"}
    used = gateway.engines.last.tools
    assert used is not None
    assert used.tools[0]["function"]["name"] == "weather"


def test_a_forced_function_is_forced(gateway: Gateway) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    gateway.openai().responses.create(model=MODEL, input="x", tools=[WEATHER], tool_choice=choice)
    used = gateway.engines.last.tools
    assert used is not None
    assert used.forced == ("weather",)


def test_sampling_fields_equal_a_chats(gateway: Gateway) -> None:
    fields: dict[str, Any] = {
        "seed": 7,
        "stop": ["END"],
        "min_tokens": 2,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1},
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs_mode": "processed_logprobs",
        "length_penalty": 1.0,
    }
    gateway.openai().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body=fields
    )
    chat = gateway.engines.last
    gateway.openai().responses.create(model=MODEL, input="x", extra_body=fields)
    response = gateway.engines.last
    assert response.sampling == chat.sampling
    assert response.sampling.ignore_eos
    assert (response.stop, response.min_tokens) == (chat.stop, chat.min_tokens) == (("END",), 2)
    body = {"model": MODEL, "input": "x", "max_output_tokens": 4, "min_tokens": 5}
    error = error_of(gateway.post("/v1/responses", body), 400)
    assert error["message"] == "min_tokens: want at most max_output_tokens (4)"


def test_input_tokens_counts_the_prompt_of_the_same_response(gateway: Gateway) -> None:
    client = gateway.openai()
    prompt: Any = {"model": MODEL, "input": "How is Paris?", "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(**prompt, tools=[WEATHER])
    assert not gateway.engines.calls
    client.responses.create(**prompt, tools=[WEATHER])
    tokens = gateway.engines.last_work.prompt_tokens
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", tokens)
    body = prompt | {"tools": [WEATHER], "stream": True, "max_output_tokens": 9}  # a whole body
    assert gateway.post("/v1/responses/input_tokens", body).json()["input_tokens"] == tokens
    nothing = error_of(gateway.post("/v1/responses/input_tokens", {"model": MODEL}), 400)
    assert nothing["param"] == "input"


def test_compaction_is_refused_by_name(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="not compacted here"):
        gateway.openai().responses.compact(model=MODEL, input="x")


def test_an_answer_can_be_constrained_to_a_schema(gateway: Gateway) -> None:
    class Event(BaseModel):
        name: str

    parsed = gateway.openai().responses.parse(
        model=MODEL, input='{"name": "fair"}', text_format=Event
    )
    assert parsed.output_parsed == Event(name="fair")
    held = gateway.engines.last.format
    assert isinstance(held, Format)
    assert '"name"' in held.text


def test_turns_and_answers_sent_back_become_a_chat(gateway: Gateway) -> None:
    client = gateway.openai()
    first = client.responses.create(model=MODEL, input="hello")
    turns: list[Any] = [
        {"type": "message", "role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *first.output,
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "and?"},
    ]
    client.responses.create(model=MODEL, instructions="Be brief.", input=turns)
    assert [(m["role"], m["content"]) for m in gateway.engines.last.messages] == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "hello"),
        ("assistant", "hello"),
        ("user", "and?"),
    ]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"background": True}, "background", "set stream"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "file_search"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "mcp"),
        ({"truncation": "auto"}, "truncation", "truncation"),
        ({"include": ["file_search_call.results"]}, "include", "include"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content",
            "input_image",
        ),
    ],
)
def test_an_unsupported_field_is_refused_by_name(
    unchanged: Gateway, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = unchanged.post(RESPONSES, {"model": MODEL, "input": "x"} | fields)
    error = error_of(answer, 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "msg_1", "role": "user"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_a_wrong_field_is_named(unchanged: Gateway, fields: dict[str, Any], param: str) -> None:
    error = error_of(unchanged.post(RESPONSES, {"model": MODEL, "input": "x"} | fields), 400)
    assert (error["code"], error["param"]) == ("invalid_value", param)


def test_a_replicas_refusal_names_this_apis_fields(gateway: Gateway) -> None:
    async def refuse(call: Call) -> AsyncGenerator[StreamItem, None]:
        yield header(call)
        yield Refusal("context_length_exceeded", "too long", "messages")

    gateway.engines.replay = refuse
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai().responses.create(model=MODEL, input="hello")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_a_failure_in_mid_stream_is_the_last_event(gateway: Gateway) -> None:
    gateway.engines.replay = fail_in_mid_stream
    *_, last = gateway.openai().responses.create(model=MODEL, input="hello", stream=True)
    assert last.type == "response.failed"
    assert last.sequence_number == 5
    assert last.response.error is not None
    assert last.response.error.message == "the step failed"


def test_why_knows_a_response_by_its_own_id(gateway: Gateway) -> None:
    answer = gateway.openai().responses.create(model=MODEL, input="hello there")
    why = gateway.request("GET", f"/v1/requests/{answer.id}", gateway.keys["acme"])
    assert why.is_success
    assert answer.id.endswith(why.json()["id"])


def test_limits_hold_for_responses_as_for_chats(gateway: Gateway) -> None:
    gateway.admin("PATCH", "/tenants/acme", {"requests_per_min": 1})
    client = gateway.openai()
    client.responses.create(model=MODEL, input="hello")
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=MODEL, input="hello")
