"""Events of a response parse with OpenAI's types and come in its documented order."""

import json
from dataclasses import replace
from typing import Any

from openai._models import construct_type
from openai.types.responses import Response, ResponseFailedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from lorikeet.apis.responses.answer import ResponseEventStream, failed_response_event, response_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.text.choice import Choice, Ending, ToolCallPart
from tests.apis.test_chat_answer import CALLS, DRAWN, official
from tests.apis.typed_events import kinds, typed_events

FIELDS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
CALL = Call(
    "r1",
    Endpoint.RESPONSES,
    1_700_000_000,
    "acme",
    "acme/support",
    None,
    stream=True,
    request_fields=json.dumps(FIELDS).encode()[1:-1],
)
USAGE = FinalUsage(prompt_tokens=5, cached_tokens=3, completion_tokens=2)
BEGIN = ["response.created", "response.in_progress"]
TEXT_BEGIN = ["response.output_item.added", "response.content_part.added"]
TEXT_END = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
TEXT = "response.output_text.delta"
ARGUMENTS = "response.function_call_arguments.delta"
CALL_END = ["response.function_call_arguments.done", "response.output_item.done"]
EVENT = TypeAdapter[Any](ResponseStreamEvent)


def events(raw: bytes) -> list[dict[str, Any]]:
    """Each one's data; the numbers count from 0, and OpenAI's types have each event."""
    read = typed_events(raw)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    for event in read:
        assert EVENT.validate_python(event).type == event["type"]
    return read


def test_a_text_has_the_published_sequence() -> None:
    stream = ResponseEventStream(CALL)
    raw = stream.delta(0, "Hé") + stream.delta(0, "y", Ending.STOP) + stream.end(USAGE)
    read = events(raw)
    assert kinds(read) == [*BEGIN, *TEXT_BEGIN, TEXT, TEXT, *TEXT_END, "response.completed"]
    assert [event["delta"] for event in read if event["type"] == TEXT] == ["Hé", "y"]
    last = official(Response, read[-1]["response"])
    assert (last.id, last.status, last.output_text) == ("resp_r1", "completed", "Héy")
    assert last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens == 3
    assert (last.usage.input_tokens, last.usage.output_tokens, last.usage.total_tokens) == (5, 2, 7)
    assert read[2]["item"] == read[-2]["item"] | {"status": "in_progress", "content": []}
    assert [read[-1]["response"]["output"], read[0]["response"]["output"]] == [
        [read[-2]["item"]],
        [],
    ]
    assert read[0]["response"]["status"] == read[1]["response"]["status"] == "in_progress"


def test_calls_have_the_published_sequence_after_their_text() -> None:
    stream = ResponseEventStream(CALL)
    raw = stream.delta(0, "Let me look.") + stream.delta(0, "", Ending.TOOL_CALLS, CALLS)
    read = events(raw + stream.end(USAGE))
    added = "response.output_item.added"
    assert kinds(read) == [
        *(*BEGIN, *TEXT_BEGIN, TEXT, *TEXT_END),
        *(added, ARGUMENTS, ARGUMENTS, *CALL_END),
        *(added, ARGUMENTS, *CALL_END),
        "response.completed",
    ]
    whole = official(Response, read[-1]["response"])
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    weather = read[-1]["response"]["output"][1]
    assert (weather["call_id"], weather["name"]) == ("call00001", "weather")
    assert json.loads(weather["arguments"]) == {"place": "Paris"}
    assert {event.get("output_index") for event in read[8:13]} == {1}


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    stream = ResponseEventStream(CALL)
    raw = stream.delta(0, "Hey", Ending.LENGTH) + stream.end(USAGE)
    last = events(raw)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    stream = ResponseEventStream(CALL)
    read = events(stream.delta(0, "", Ending.STOP) + stream.end(USAGE))
    assert kinds(read) == [*BEGIN, *TEXT_BEGIN, *TEXT_END, "response.completed"]


def test_text_after_a_call_is_a_separate_message() -> None:
    stream = ResponseEventStream(CALL)
    raw = stream.delta(0, "a", None, CALLS[:2]) + stream.delta(0, "b", Ending.STOP)
    output = events(raw + stream.end(USAGE))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert len({item["id"] for item in output}) == 3


def test_logprobs_come_with_the_text_and_whole_at_its_end() -> None:
    stream = ResponseEventStream(CALL)
    raw = stream.delta(0, "a", None, (), DRAWN) + stream.delta(0, "", Ending.STOP)
    read = events(raw + stream.end(USAGE))
    (delta,) = [event for event in read if event["type"] == TEXT]
    part = read[-1]["response"]["output"][0]["content"][0]
    assert delta["logprobs"] == part["logprobs"] == read[-4]["logprobs"]
    assert [top["bytes"] for top in part["logprobs"][0]["top_logprobs"]] == [[97], []]


def test_a_stream_that_failed_ends_with_the_error() -> None:
    begun = ResponseEventStream(CALL).delta(0, "Hey")
    number = begun.count(b"\n\n")
    assert number == len(events(begun))
    event = failed_response_event(CALL, number, "unavailable", "send it again").decode()
    name, data = event.rstrip("\n").split("\n")
    last = json.loads(data.removeprefix("data: "))
    assert (name, last["sequence_number"]) == ("event: response.failed", number)
    # read as its client reads it, which lets an error have a code of ours
    read = construct_type(type_=ResponseFailedEvent, value=last)
    assert read.response.status == "failed"
    assert (read.response.error.code, read.response.error.message) == (
        "unavailable",
        "send it again",
    )


def test_a_whole_response_equals_the_last_event_of_the_stream() -> None:
    for choice in (
        Choice("Hey", Ending.LENGTH),
        Choice("Hey", Ending.TOOL_CALLS, CALLS),
        Choice("", Ending.LENGTH, CALLS),
        Choice("", Ending.STOP),
    ):
        body = json.loads(response_body(replace(CALL, stream=False), choice, USAGE))
        official(Response, body)
        stream = ResponseEventStream(CALL)
        raw = stream.delta(0, choice.text, choice.finish, choice.calls) + stream.end(USAGE)
        assert events(raw)[-1]["response"] == body


def test_missing_arguments_are_empty() -> None:
    calls = [ToolCallPart(0, "", "call00001", "weather")]
    body = json.loads(response_body(CALL, Choice("", Ending.LENGTH, calls), USAGE))
    assert body["output"][0]["arguments"] == ""
