"""`strict: false` in each API: the answer says whether it is valid."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.text.grammars.schema_faults import answer_schemas
from tests.gateway.conftest import Gateway
from tests.gateway.official_types import validate_as
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, TURN
from tests.replica.published_templates import QWEN3

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TAGS: dict[str, Any] = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
}
ONCE, TWICE = '{"tags": ["a", "b"]}', '{"tags": ["a", "a"]}'
ERROR = "at $.tags: the value breaks $.properties.tags.uniqueItems of the schema"
VALID = [{"index": 0, "valid": True, "error": None}]
INVALID = [{"index": 0, "valid": False, "error": ERROR}]
FUNCTION: dict[str, Any] = {"name": "tag", "parameters": TAGS}
CHAT_BODY: dict[str, Any] = {"model": "tiny", "messages": [TURN]}
MESSAGE_BODY: dict[str, Any] = {**CHAT_BODY, "max_tokens": 99}
RESPONSE_BODY: dict[str, Any] = {"model": "tiny", "input": "Tags?"}


def chat_format(**strict: bool) -> dict[str, Any]:
    schema = {"name": "tags", "schema": TAGS, **strict}
    return {**CHAT_BODY, "response_format": {"type": "json_schema", "json_schema": schema}}


def response_format(**strict: bool) -> dict[str, Any]:
    form = {"type": "json_schema", "name": "tags", "schema": TAGS, **strict}
    return {**RESPONSE_BODY, "text": {"format": form}}


def message_format(**strict: bool) -> dict[str, Any]:
    form = {"type": "json_schema", "schema": TAGS, **strict}
    return {**MESSAGE_BODY, "output_config": {"format": form}}


def chat_tool(**strict: bool) -> dict[str, Any]:
    tools = [{"type": "function", "function": {**FUNCTION, **strict}}]
    return {**CHAT_BODY, "tools": tools, "tool_choice": "required"}


def response_tool(**strict: bool) -> dict[str, Any]:
    tools = [{"type": "function", **FUNCTION, **strict}]
    return {**RESPONSE_BODY, "tools": tools, "tool_choice": "required"}


def message_tool(**strict: bool) -> dict[str, Any]:
    tools = [{"name": "tag", "input_schema": TAGS, **strict}]
    return {**MESSAGE_BODY, "tools": tools, "tool_choice": {"type": "any"}}


FORMATS = [(CHAT, chat_format), (RESPONSES, response_format), (MESSAGES, message_format)]
TOOLS = [(CHAT, chat_tool), (RESPONSES, response_tool), (MESSAGES, message_tool)]
TYPES = {CHAT: "ChatCompletion", RESPONSES: "Response", MESSAGES: "Message"}


@pytest.fixture
def scripted(gateway: Gateway, tmp_path: Path) -> ScriptedReplica:
    return ScriptedReplica(tmp_path, QWEN3)


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "tag", "arguments": {arguments}}}\n</tool_call>'


def last_event(text: str) -> Any:
    """Return the last event of a stream that has data of its own."""
    datas = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(data) for data in datas if data != "[DONE]"]
    return [event for event in events if event.get("type") != "message_stop"][-1]


@pytest.mark.parametrize(("path", "body"), FORMATS)
@pytest.mark.parametrize(("said", "check"), [(ONCE, VALID), (TWICE, INVALID)])
def test_an_answer_says_whether_it_is_valid(
    gateway: Gateway, scripted: ScriptedReplica, path: str, body: Any, said: str, check: Any
) -> None:
    gateway.engines.replay = scripted.writes(said)
    answer = gateway.post(path, body(strict=False))
    assert answer.headers["x-lorikeet-ignored"] == "uniqueItems:$.properties.tags"
    whole = answer.json()
    assert whole["schema_check"] == check
    validate_as(TYPES[path], whole)
    last = last_event(gateway.post(path, {**body(strict=False), "stream": True}).text)
    assert (last["response"] if path == RESPONSES else last)["schema_check"] == check


@pytest.mark.parametrize(("path", "body"), TOOLS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_whether_its_calls_are_valid(
    gateway: Gateway, scripted: ScriptedReplica, path: str, body: Any, stream: bool
) -> None:
    gateway.engines.replay = scripted.writes(called(TWICE))
    answer = gateway.post(path, {**body(strict=False), "stream": stream})
    assert answer.headers["x-lorikeet-ignored"] == "uniqueItems:tag:$.properties.tags"
    last = last_event(answer.text) if stream else answer.json()
    assert last.get("response", last)["schema_check"] == INVALID


def test_the_check_stands_beside_the_usage_of_a_stream(
    gateway: Gateway, scripted: ScriptedReplica
) -> None:
    gateway.engines.replay = scripted.writes(TWICE)
    asked = chat_format(strict=False)
    chunks = list(
        gateway.openai().chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks:
        validate_as("ChatCompletionChunk", chunk.to_dict())
    assert chunks[-1].usage is not None
    assert chunks[-1].to_dict()["schema_check"] == INVALID
    assert sum("schema_check" in chunk.to_dict() for chunk in chunks) == 1


@pytest.mark.parametrize(("path", "body"), [*FORMATS, *TOOLS])
@pytest.mark.parametrize(
    ("given", "strict"), [({}, True), ({"strict": True}, True), ({"strict": False}, False)]
)
def test_only_an_explicit_false_lets_go(
    gateway: Gateway, path: str, body: Any, given: Any, strict: bool
) -> None:
    gateway.post(path, body(**given))
    (asked,) = answer_schemas(gateway.engines.last)
    assert asked.lets_go is not strict


def test_an_answer_that_is_held_whole_is_not_checked(
    gateway: Gateway, scripted: ScriptedReplica
) -> None:
    gateway.engines.replay = scripted.writes('{"n": 1}')
    held = {"type": "object", "properties": {"n": {"type": "integer"}}}
    schema = {"name": "n", "schema": held, "strict": False}
    form = {"type": "json_schema", "json_schema": schema}
    answer = gateway.post(CHAT, {**CHAT_BODY, "response_format": form})
    assert "schema_check" not in answer.json()
    assert "x-lorikeet-ignored" not in answer.headers
