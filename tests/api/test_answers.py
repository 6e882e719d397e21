"""The bytes a client gets are OpenAI's, read back with OpenAI's own types."""

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lorikeet.api.answers import Choice, EventStream, Usage, failed_event, json_body
from lorikeet.api.messages import Call, Endpoint
from lorikeet_engine.request import FinishReason


def call(endpoint: Endpoint, **fields: Any) -> Call:
    return Call("r1", endpoint, 1_700_000_000, "acme", "acme/support", None, **fields)


def events(raw: bytes) -> list[Any]:
    lines = raw.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [s if s == "[DONE]" else json.loads(s) for s in (line[6:] for line in lines)]


def test_a_chat_stream_is_role_then_text_then_finish_then_done() -> None:
    stream = EventStream(call(Endpoint.CHAT, stream=True))
    raw = stream.delta(0, "Hel") + stream.delta(0, "lo", FinishReason.STOP)
    *chunks, done = events(raw + stream.end(Usage(3, 2)))
    read = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
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
    raw = stream.delta(0, "a", FinishReason.LENGTH) + stream.end(Usage(3, 1, cached_tokens=2))
    *chunks, usage, done = events(raw)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert done == "[DONE]"


def test_a_completion_stream_carries_text_and_finish_in_one_event() -> None:
    stream = EventStream(call(Endpoint.COMPLETIONS, stream=True))
    (chunk,) = events(stream.delta(3, "end", FinishReason.LENGTH))
    read = Completion.model_validate(chunk)
    assert (read.id, read.object) == ("cmpl-r1", "text_completion")
    assert (read.choices[0].index, read.choices[0].text) == (3, "end")
    assert read.choices[0].finish_reason == "length"


def test_nothing_new_is_no_event() -> None:
    stream = EventStream(call(Endpoint.COMPLETIONS, stream=True))
    assert stream.delta(0, "") == b""


def test_text_that_could_break_an_event_survives() -> None:
    text = 'a\n\ndata: "x"\u2028\u0085\\ 雀 \U0001f99c'
    stream = EventStream(call(Endpoint.CHAT, stream=True))
    raw = stream.delta(0, text)
    assert len(raw.decode().splitlines()) == 4  # two events, each with its blank line
    assert events(raw)[1]["choices"][0]["delta"]["content"] == text


def test_a_body_has_every_choice_in_order() -> None:
    choices = [Choice("one", FinishReason.STOP), Choice("two", FinishReason.LENGTH)]
    chat = json_body(call(Endpoint.CHAT, n=2), choices, Usage(5, 7))
    read = ChatCompletion.model_validate_json(chat)
    assert [(c.index, c.message.content, c.finish_reason) for c in read.choices] == [
        (0, "one", "stop"),
        (1, "two", "length"),
    ]
    assert read.usage is not None
    assert read.usage.total_tokens == 12
    text = json_body(call(Endpoint.COMPLETIONS, n=2), choices, Usage(5, 7))
    assert [c.text for c in Completion.model_validate_json(text).choices] == ["one", "two"]


def test_a_failure_after_the_first_byte_is_one_error_event() -> None:
    (event,) = events(failed_event("generation_failed", "the step failed; send it again"))
    assert event["error"] == {
        "message": "the step failed; send it again",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
