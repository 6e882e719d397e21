"""Events of a message parse with Anthropic's types and come in its documented order."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from lorikeet.apis.answer import token_count_body
from lorikeet.apis.messages.answer import MessageEventStream, failed_message_event, message_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.text.choice import Choice, Ending, ToolCallPart
from tests.apis.test_chat_answer import CALLS, assert_no_extras
from tests.apis.typed_events import kinds, typed_events

anthropic = pytest.importorskip("anthropic")
Message = anthropic.types.Message

CALL = Call(
    "r1",
    Endpoint.MESSAGES,
    1_700_000_000,
    "acme",
    "acme/support",
    None,
    stream=True,
    max_tokens=9,
)
USAGE = FinalUsage(prompt_tokens=25, cached_tokens=20, completion_tokens=9, reasoning_tokens=4)
TAKEN = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 20,
    "output_tokens": 9,
    "output_tokens_details": {"thinking_tokens": 4},
}
EVENT = TypeAdapter[Any](anthropic.types.RawMessageStreamEvent)
START, STOP = "content_block_start", "content_block_stop"
DELTA = "content_block_delta"


@dataclass
class Progress:
    stopped_by: str | None = None

    def usage(self) -> FinalUsage:
        return replace(USAGE, completion_tokens=1)

    def stop_string(self, choice: int) -> str | None:
        return self.stopped_by


def stream(stopped_by: str | None = None, **fields: Any) -> MessageEventStream:
    return MessageEventStream(replace(CALL, **fields), Progress(stopped_by))


def events(raw: bytes) -> list[dict[str, Any]]:
    """Each one's data; Anthropic's types know each field."""
    read = typed_events(raw)
    for event in read:
        if event["type"] not in ("ping", "error"):
            assert_no_extras(EVENT.validate_python(event))
    return read


def accumulated(read: list[dict[str, Any]]) -> Any:
    """The message that Anthropic's client makes of a stream."""
    message: Any = None
    json_parts: dict[int, bytes] = {}
    for event in read:
        if event["type"] != "ping":
            message = anthropic.lib.streaming._messages.accumulate_event(
                event=EVENT.validate_python(event), current_snapshot=message, json_bufs=json_parts
            )
    return Message.model_validate(message.to_dict())


def whole(choice: Choice, usage: FinalUsage = USAGE, call: Call = CALL) -> Any:
    answer = json.loads(message_body(call, choice, usage))
    message = Message.model_validate(answer, strict=True)
    assert_no_extras(message)
    assert message.to_dict() == answer
    return message


def test_a_text_has_the_published_sequence() -> None:
    making = stream()
    raw = making.delta(0, "Hé") + making.delta(0, "y", Ending.STOP) + making.end(USAGE)
    read = events(raw)
    assert read == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_r1",
                "type": "message",
                "role": "assistant",
                "model": "acme/support",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "stop_details": None,
                "usage": TAKEN | {"output_tokens": 1, "service_tier": "standard"},
            },
        },
        {"type": START, "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": DELTA, "index": 0, "delta": {"type": "text_delta", "text": "Hé"}},
        {"type": DELTA, "index": 0, "delta": {"type": "text_delta", "text": "y"}},
        {"type": STOP, "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None},
            "usage": TAKEN,
        },
        {"type": "message_stop"},
    ]


def test_calls_have_the_published_sequence_after_their_text() -> None:
    making = stream()
    raw = making.delta(0, "Let me look.") + making.delta(0, "", Ending.TOOL_CALLS, CALLS)
    read = events(raw + making.end(USAGE))
    assert kinds(read) == [
        *("message_start", START, "ping", DELTA, STOP),
        *(START, DELTA, DELTA, STOP),
        *(START, DELTA, STOP),
        *("message_delta", "message_stop"),
    ]
    assert read[5]["content_block"] == {
        "type": "tool_use",
        "id": "call00001",
        "name": "weather",
        "input": {},
    }
    assert [event["index"] for event in read if event["type"] == STOP] == [0, 1, 2]
    assert read[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_is_the_first_block_and_has_a_signature() -> None:
    making = stream()
    raw = making.delta(0, "", reasoning="Two") + making.delta(0, "", reasoning=" and two?")
    read = events(raw + making.delta(0, "4", Ending.STOP) + making.end(USAGE))
    assert kinds(read) == [
        *("message_start", START, "ping", DELTA, DELTA, DELTA, STOP),
        *(START, DELTA, STOP),
        *("message_delta", "message_stop"),
    ]
    assert read[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    thinking = "thinking_delta"
    assert [event["delta"] for event in read[3:6]] == [
        {"type": thinking, "thinking": "Two"},
        {"type": thinking, "thinking": " and two?"},
        {"type": "signature_delta", "signature": "unsigned"},
    ]
    block = accumulated(read).content[0]
    assert (block.thinking, block.signature) == ("Two and two?", "unsigned")


@pytest.mark.parametrize(
    "choice",
    [
        Choice("Hey", Ending.STOP),
        Choice("", Ending.STOP),
        Choice("Look:", Ending.TOOL_CALLS, CALLS),
        Choice("", Ending.TOOL_CALLS, CALLS[:3]),
        Choice("cut", Ending.LENGTH),
        Choice("", Ending.LENGTH, CALLS[:2]),
        Choice("so far", Ending.STOP, stop="END"),
        Choice("It is 4.", Ending.TOOL_CALLS, CALLS, reasoning="2 + 2, é"),
        Choice("", Ending.LENGTH, reasoning="2 + 2"),
    ],
)
def test_a_stream_adds_up_to_the_whole_message(choice: Choice) -> None:
    making = stream(choice.stop)
    raw = making.delta(0, choice.text, reasoning=choice.reasoning)
    raw += making.delta(0, "", choice.finish, choice.calls)
    streamed = accumulated(events(raw + making.end(USAGE)))
    assert streamed.to_dict() == whole(choice).to_dict()


@pytest.mark.parametrize(
    ("choice", "made", "reason"),
    [
        (Choice("a", Ending.STOP), 3, "end_turn"),
        (Choice("a", Ending.LENGTH), 9, "max_tokens"),
        (Choice("a", Ending.LENGTH), 3, "model_context_window_exceeded"),
        (Choice("a", Ending.TOOL_CALLS, CALLS), 3, "tool_use"),
        (Choice("a", Ending.LENGTH, CALLS), 9, "max_tokens"),
        (Choice("a", Ending.STOP, stop="\n\n"), 3, "stop_sequence"),
    ],
)
def test_a_message_has_its_stop_reason(choice: Choice, made: int, reason: str) -> None:
    message = whole(choice, replace(USAGE, completion_tokens=made))
    assert (message.stop_reason, message.stop_sequence) == (reason, choice.stop)
    assert message.usage.output_tokens == made


def test_an_answer_without_text_has_no_content() -> None:
    call, usage = replace(CALL, max_tokens=0), replace(USAGE, completion_tokens=0)
    message = whole(Choice("", Ending.LENGTH), usage, call)
    assert (message.content, message.stop_reason) == ([], "max_tokens")


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ('{"at": "Zürich", "n": 1.50}', b'{"at": "Z\\u00fcrich", "n": 1.50}'),
        ('{"n": 1e999}', b'{"n": 1e999}'),
        ('{"at": {"city": "Par', b'{"at":{"city":"Par"}}'),
        ('{"n": 1e999, "at', b"{}"),
        ("{", b"{}"),
        ("", b"{}"),
    ],
)
def test_an_input_that_was_cut_off_becomes_an_object_of_its_beginning(
    arguments: str, there: bytes
) -> None:
    calls = [ToolCallPart(0, "", "call00001", "weather"), ToolCallPart(0, arguments)]
    body = message_body(CALL, Choice("", Ending.LENGTH, calls), USAGE)
    assert b'"input":' + there + b"}" in body
    assert isinstance(json.loads(body)["content"][0]["input"], dict)


def test_a_line_separator_does_not_split_an_event() -> None:
    raw = stream().delta(0, "a\u2028b")
    assert events(raw)[-1]["delta"]["text"] == "a\u2028b"


def test_a_failure_is_the_published_event() -> None:
    (event,) = events(failed_message_event(CALL, "overloaded", "send it again"))
    assert event == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "send it again",
            "details": {"error_code": "overloaded"},
        },
        "request_id": "r1",
    }


def test_a_token_count_is_the_prompts() -> None:
    assert json.loads(token_count_body(Endpoint.COUNT_TOKENS, 17)) == {"input_tokens": 17}
    told = json.loads(token_count_body(Endpoint.INPUT_TOKENS, 17))
    assert told == {"object": "response.input_tokens", "input_tokens": 17}
