"""Answers' bytes parse with OpenAI's own types."""

import json
from typing import Any, TypeVar

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from lorikeet.apis.chat.answer import EventStream, failed_completion_event, json_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.text.choice import Choice, Ending, ToolCallPart
from lorikeet.text.logprobs import LogprobsJson, NamedToken, SampledToken

T = TypeVar("T", bound=openai.BaseModel)
CALLS = [
    ToolCallPart(0, "", "call00001", "weather"),
    ToolCallPart(0, '{"place": '),
    ToolCallPart(0, '"Paris"}'),
    ToolCallPart(1, "", "call00002", "time"),
    ToolCallPart(1, "{}"),
]
LIKELY, END = NamedToken("a", b"a"), NamedToken("<|eos|>", None)
DRAWN = [SampledToken((LIKELY, LIKELY, END), (-0.5, -0.5, -1.5), 0)]


def call(endpoint: Endpoint, **fields: Any) -> Call:
    return Call("r1", endpoint, 1_700_000_000, "acme", "acme/support", None, **fields)


def events(raw: bytes) -> list[Any]:
    lines = raw.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [s if s == "[DONE]" else json.loads(s) for s in (line[6:] for line in lines)]


def official(kind: type[T], answer: dict[str, Any]) -> T:
    """An answer as OpenAI's client has it: every field of a right type, and none that it lacks."""
    read = kind.model_validate(answer, strict=True)
    assert read.to_dict() == answer
    assert_no_extras(read)
    return read


def assert_no_extras(value: Any) -> None:
    """A type of OpenAI's or Anthropic's client knows every field of what it was read from."""
    if isinstance(value, list):
        for item in value:
            assert_no_extras(item)
    elif isinstance(value, BaseModel):
        assert not value.model_extra
        for name in type(value).model_fields:
            assert_no_extras(getattr(value, name))


def test_a_chat_stream_is_role_then_text_then_finish_then_done() -> None:
    stream = EventStream(call(Endpoint.CHAT, stream=True))
    raw = stream.delta(0, "Hel") + stream.delta(0, "lo", Ending.STOP)
    *chunks, done = events(raw + stream.end(FinalUsage(3, 0, 2)))
    read = [official(ChatCompletionChunk, chunk) for chunk in chunks]
    assert [c.choices[0].delta.role for c in read] == ["assistant", None, None, None]
    assert [c.choices[0].delta.content for c in read] == ["", "Hel", "lo", None]
    assert [c.choices[0].finish_reason for c in read] == [None, None, None, "stop"]
    assert {c.id for c in read} == {"chatcmpl-r1"}
    assert all("usage" not in chunk for chunk in chunks)
    assert done == "[DONE]"


def test_each_choice_of_a_chat_stream_gets_its_own_role() -> None:
    stream = EventStream(call(Endpoint.CHAT, stream=True, n=2))
    chunks = events(stream.delta(1, "b") + stream.delta(0, "a") + stream.delta(1, "c"))
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert roles == [1, 0]


def test_usage_comes_last_with_no_choices_and_is_null_before() -> None:
    stream = EventStream(call(Endpoint.CHAT, stream=True, include_usage=True))
    raw = stream.delta(0, "a", Ending.LENGTH) + stream.end(FinalUsage(3, 2, 1))
    *chunks, usage, done = events(raw)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert done == "[DONE]"


def test_a_completion_stream_carries_text_and_finish_in_one_event() -> None:
    stream = EventStream(call(Endpoint.COMPLETIONS, stream=True))
    (chunk,) = events(stream.delta(3, "end", Ending.LENGTH))
    read = official(Completion, chunk)
    assert (read.id, read.object) == ("cmpl-r1", "text_completion")
    assert (read.choices[0].index, read.choices[0].text) == (3, "end")
    assert read.choices[0].finish_reason == "length"


def test_an_empty_delta_makes_no_event() -> None:
    stream = EventStream(call(Endpoint.COMPLETIONS, stream=True))
    assert stream.delta(0, "") == b""


def test_text_that_could_break_an_event_survives() -> None:
    text = 'a\n\ndata: "x"\u2028\u0085\\ 雀 \U0001f99c'
    stream = EventStream(call(Endpoint.CHAT, stream=True))
    raw = stream.delta(0, text)
    assert len(raw.decode().splitlines()) == 4  # two events, each with its blank line
    assert events(raw)[1]["choices"][0]["delta"]["content"] == text


def test_a_body_has_every_choice_in_order() -> None:
    choices = [Choice("one", Ending.STOP), Choice("two", Ending.LENGTH)]
    chat = json_body(call(Endpoint.CHAT, n=2), choices, FinalUsage(5, 0, 7))
    read = official(ChatCompletion, json.loads(chat))
    assert [(c.index, c.message.content, c.finish_reason) for c in read.choices] == [
        (0, "one", "stop"),
        (1, "two", "length"),
    ]
    assert read.usage is not None
    assert read.usage.total_tokens == 12
    text = json_body(call(Endpoint.COMPLETIONS, n=2), choices, FinalUsage(5, 0, 7))
    assert [c.text for c in Completion.model_validate_json(text).choices] == ["one", "two"]


def test_a_failure_after_the_first_byte_is_one_error_event() -> None:
    (event,) = events(
        failed_completion_event("generation_failed", "the step failed; send it again")
    )
    assert event["error"] == {
        "message": "the step failed; send it again",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }


def test_tool_calls_are_streamed_in_pieces_and_end_the_choice() -> None:
    stream = EventStream(call(Endpoint.CHAT, stream=True, include_usage=True))
    raw = stream.delta(0, "", calls=CALLS[:2]) + stream.delta(0, "", Ending.TOOL_CALLS, CALLS[2:])
    state = ChatCompletionStreamState()
    *chunks, _ = events(raw + stream.end(FinalUsage(3, 0, 2)))
    for chunk in chunks:
        state.handle_chunk(official(ChatCompletionChunk, chunk))
    whole = state.get_final_completion().choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    calls = whole.message.tool_calls or []
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        ("call00001", "weather", '{"place": "Paris"}'),
        ("call00002", "time", "{}"),
    ]


def test_a_body_joins_the_pieces_of_tool_calls() -> None:
    whole = json.loads(
        json_body(call(Endpoint.CHAT), [Choice("", Ending.TOOL_CALLS, CALLS)], FinalUsage(5, 0, 7))
    )
    (choice,) = official(ChatCompletion, whole).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [c.function.arguments for c in choice.message.tool_calls] == [  # type: ignore[union-attr]
        '{"place": "Paris"}',
        "{}",
    ]


def test_cut_off_calls_finish_with_length() -> None:
    body = json_body(call(Endpoint.CHAT), [Choice("", Ending.LENGTH, CALLS)], FinalUsage(5, 0, 7))
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"


def test_text_before_a_call_is_the_messages_content() -> None:
    stream = EventStream(call(Endpoint.CHAT, stream=True))
    chunks = events(stream.delta(0, "Let me look.", Ending.TOOL_CALLS, CALLS))
    deltas = [official(ChatCompletionChunk, chunk).choices[0].delta for chunk in chunks]
    assert [delta.content for delta in deltas[:2]] == ["", "Let me look."]
    assert [bool(delta.tool_calls) for delta in deltas] == [False, False, *[True] * 5, False]


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_logprobs_are_openais_whole_and_streamed(endpoint: Endpoint) -> None:
    chat = endpoint is Endpoint.CHAT
    logprobs = LogprobsJson(endpoint)
    logprobs.add(DRAWN)
    choice = Choice("a", Ending.STOP, logprobs=logprobs)
    whole = json.loads(json_body(call(endpoint), [choice], FinalUsage(1, 0, 1)))
    official(ChatCompletion if chat else Completion, whole)
    stream = EventStream(call(endpoint, stream=True))
    chunks = events(stream.delta(0, "a", Ending.STOP, logprobs=DRAWN))
    for chunk in chunks:
        official(ChatCompletionChunk if chat else Completion, chunk)
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert told == [whole["choices"][0]["logprobs"]]


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_added_singly_or_together_give_the_same_json(
    endpoint: Endpoint, count: int
) -> None:
    tokens = [DRAWN[0]._replace(offset=at) for at in range(count)]
    one_by_one, together = LogprobsJson(endpoint), LogprobsJson(endpoint)
    together.add(tokens)
    for token in tokens:
        one_by_one.add([token])
        one_by_one.add([])
    assert one_by_one.json() == together.json()
    choice = Choice("a", Ending.STOP, logprobs=together)
    whole = json.loads(json_body(call(endpoint), [choice], FinalUsage(1, 0, 1)))
    official(ChatCompletion if endpoint is Endpoint.CHAT else Completion, whole)
    assert {len(value) for value in whole["choices"][0]["logprobs"].values() if value} <= {count}
