"""Time that bodies made to be costly take of the one thread that all requests share."""

import json
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lorikeet.apis.body import MAX_VALUES, parse_json
from lorikeet.apis.chat.request import ChatRequest
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.messages.request import MessagesRequest
from lorikeet.apis.request import ApiRequest, CallContext, ResolvedModel
from lorikeet.apis.responses.request import ResponsesRequest
from lorikeet.errors import InvalidInput
from lorikeet.gateway.body import MAX_JSON_BYTES
from lorikeet.protocol.messages import Call
from lorikeet_engine.request import SchedulingParams
from tests.gateway.conftest import Gateway, chat
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, error_of
from tests.processor_time import in_time

LONGEST_S = 0.5
"""Most processor seconds of a body. Without limits, the bodies refused here took 1 to 6 s."""
MOST_PICKLED = 2 * MAX_JSON_BYTES
ROOM = 512


def call_of(body: bytes, schema: type[ApiRequest] = ChatRequest) -> Call:
    request = parse_json(body, schema)
    return request.to_call(
        CallContext("0" * 32, 0, "acme", None, SchedulingParams("acme"), ResolvedModel("tiny"))
    )


def list_of(value: str, length: int) -> str:
    return "[" + ",".join([value] * (length // (len(value) + 1))) + "]"


def with_tools(inner: str) -> str:
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{{"a":{inner}}}}}}}'
    return json.dumps(chat())[:-1] + f',"tools":[{tool}]}}'


def with_schema(inner: str) -> str:
    schema = f'{{"name":"f","schema":{{"a":{inner}}}}}'
    form = f'{{"type":"json_schema","json_schema":{schema}}}'
    return json.dumps(chat())[:-1] + f',"response_format":{form}}}'


def with_functions(inner: str) -> str:
    function = f'{{"name":"f","parameters":{{"a":{inner}}}}}'
    return json.dumps(chat())[:-1] + f',"functions":[{function}]}}'


def with_guided_json(inner: str) -> str:
    """Return the schema as JSON text of the body."""
    return json.dumps(chat(guided_json=f'{{"a":{inner}}}'))


def with_template_args(inner: str) -> str:
    return json.dumps(chat())[:-1] + f',"chat_template_kwargs":{{"a":{inner}}}}}'


def with_call(inner: str) -> str:
    return with_arguments(f'{{"a":{inner}}}')


def with_arguments(text: str) -> str:
    function = {"name": "f", "arguments": text}
    call = {"id": "1", "type": "function", "function": function}
    return json.dumps({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]})


def with_unknown(inner: str) -> str:
    return json.dumps(chat())[:-1] + f',"unknown":{inner}}}'


def with_padding(inner: str) -> str:
    """Return a body with the most values allowed and a text of the greatest length allowed."""
    few = inner[: (MAX_VALUES // 2 - ROOM) * 2].rpartition(",")[0] + "]"
    return with_tools(few).replace("hello there", "a,b[" * ((MAX_JSON_BYTES - len(few)) // 5))


FULL = MAX_JSON_BYTES - ROOM
COSTLY: dict[str, Callable[[], str]] = {
    "lists in tools": lambda: with_tools(list_of("[]", FULL)),
    "objects in tools": lambda: with_tools(list_of("{}", FULL)),
    "floats in tools": lambda: with_tools(list_of("1e1", FULL)),
    "strings in tools": lambda: with_tools(list_of('""', FULL)),
    "one string in tools": lambda: with_tools('"' + "é" * (FULL // 2) + '"'),
    "lists in a schema": lambda: with_schema(list_of("[]", FULL)),
    "one string in a schema": lambda: with_schema('"' + "é" * (FULL // 2) + '"'),
    "lists in functions": lambda: with_functions(list_of("[]", FULL)),
    "lists in a schema's text": lambda: with_guided_json(list_of("[]", FULL)),
    "one string in a schema's text": lambda: with_guided_json('"' + "a" * (FULL - 8) + '"'),
    "choices": lambda: json.dumps(chat(guided_choice=["a" * (FULL // 1024 - 8)] * 1024)),
    "lists in a template's variable": lambda: with_template_args(list_of("[]", FULL)),
    "the most in a template's variable": lambda: with_template_args(list_of("[]", MAX_VALUES)),
    "one string in a template's variable": lambda: with_template_args('"' + "a" * FULL + '"'),
    "lists in a call": lambda: with_call(list_of("[]", FULL)),
    "lists in an unknown field": lambda: with_unknown(list_of("[]", FULL)),
    "the most that is taken": lambda: with_padding(list_of("[]", FULL)),
    "floats, the most that is taken": lambda: with_padding(list_of("1e1", FULL)),
    "a string without an end": lambda: '"' + "," * (2 * MAX_VALUES) + '\\"' * (FULL // 4),
    "arguments without an end": lambda: with_arguments('"' + '\\"' * (FULL // 8)),
    "escapes": lambda: json.dumps(chat(content='",[' * (FULL // 4))),
}


LONG_TEXT = {"type": "text", "text": "a" * (FULL // 2)}
TEXT = {"type": "text", "text": "a"}
COSTLY_MESSAGES: dict[str, list[Any]] = {
    "blocks behind a long one": [{"role": "user", "content": [LONG_TEXT, *[TEXT] * 12_000]}],
    "turns behind a long one": [
        {"role": "user", "content": [LONG_TEXT]},
        *[{"role": "user", "content": [TEXT]}] * 4_000,
    ],
    "blocks of an unknown type": [{"role": "user", "content": [{"type": "image"}] * 15_000}],
}


@pytest.mark.parametrize("made", COSTLY.values(), ids=COSTLY.keys())
def test_no_body_blocks_a_gateway(made: Callable[[], str]) -> None:
    parse_in_time(made().encode(), ChatRequest)


@pytest.mark.parametrize("messages", COSTLY_MESSAGES.values(), ids=COSTLY_MESSAGES.keys())
def test_no_messages_body_blocks_a_gateway(messages: list[Any]) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 9, "messages": messages})
    parse_in_time(body.encode(), MessagesRequest)


def parse_in_time(body: bytes, schema: type[ApiRequest]) -> None:
    assert len(body) <= MAX_JSON_BYTES
    began_s = time.thread_time()
    try:
        sent = len(pickle.dumps(call_of(body, schema)))
    except InvalidInput:
        sent = 0
    assert in_time(time.thread_time() - began_s, LONGEST_S)
    assert sent < MOST_PICKLED


def test_too_many_values_are_refused_by_number(unchanged: Gateway) -> None:
    for body in (with_tools(list_of("1e1", FULL)), with_call(list_of("[]", FULL))):
        error = error_of(unchanged.post(CHAT, body.encode()), 413)
        assert error["code"] == "request_too_large"
        assert "more than 65536 JSON values and keys" in error["message"]


@pytest.mark.parametrize("field", ["tools", "response_format.json_schema.schema"])
def test_long_tools_and_schemas_are_refused_by_name(unchanged: Gateway, field: str) -> None:
    body = (with_tools if field == "tools" else with_schema)('"' + "a" * 2**20 + '"')
    error = error_of(unchanged.post(CHAT, body.encode()), 400)
    assert error["param"] == field
    assert "at most 1048576 characters of JSON" in error["message"]


def long_texts() -> Iterator[tuple[str, Any]]:
    """Return texts with more commas than a body may have values."""
    text = 'one, two, {"three": [4]}, \\"\n' * (2 * MAX_VALUES // 6)
    yield CHAT, chat("tiny", text)
    arguments = json.dumps({"file": text})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    yield CHAT, {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    yield COMPLETIONS, {"model": "tiny", "prompt": list(range(130_000))}


def test_commas_in_strings_and_ids_of_a_prompt_are_allowed() -> None:
    for path, body in long_texts():
        call_of(json.dumps(body).encode(), ChatRequest if path == CHAT else CompletionRequest)


def test_a_user_that_a_response_would_repeat_three_times_has_a_bound() -> None:
    body = {"model": "tiny", "input": "hi", "user": "é" * 1024}
    assert call_of(json.dumps(body).encode(), ResponsesRequest)
    with pytest.raises(InvalidInput, match="at most 1024 characters") as refused:
        call_of(json.dumps(body | {"user": "é" * 1025}).encode(), ResponsesRequest)
    assert refused.value.param == "user"
