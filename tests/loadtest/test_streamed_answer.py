"""Answers in the stream formats of every API, as the product writes them."""

import pytest

from loadtest.streamed_answer import (
    MESSAGES,
    OPENAI,
    RESPONSES,
    AnswerReader,
    LoadRequest,
    StreamedAnswer,
    StreamFormat,
)
from lorikeet.apis.answer import event_stream, failed_event
from lorikeet.errors import GenerationFailed
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.text.choice import Ending
from tests.gateway.conftest import Played
from tests.loadtest.test_client import HEAD, chunked

USAGE = FinalUsage(prompt_tokens=7, cached_tokens=0, completion_tokens=3)
APIS = {
    Endpoint.CHAT: OPENAI,
    Endpoint.COMPLETIONS: OPENAI,
    Endpoint.RESPONSES: RESPONSES,
    Endpoint.MESSAGES: MESSAGES,
}
of_each_api = pytest.mark.parametrize(("endpoint", "streamed"), APIS.items())


def call_of(endpoint: Endpoint) -> Call:
    repeated = b'"max_output_tokens":3,"text":{"format":{"type":"text"}}'
    return Call(
        *("a" * 32, endpoint, 0, "acme", "tiny", None),
        max_tokens=3,
        stream=True,
        include_usage=True,
        request_fields=repeated,
    )


def stream_of(call: Call, finish: Ending) -> list[bytes]:
    """Return a stream of three tokens, each in its own event, and the end."""
    events = event_stream(call, Played(USAGE))
    tokens = [events.delta(0, text) for text in ('"a', "text_delta")]
    return [*tokens, events.delta(0, "c", finish), events.end(USAGE)]


def read(streamed: StreamFormat, *parts: bytes) -> StreamedAnswer:
    """Return the answer that arrives in these parts, one a second."""
    answer = StreamedAnswer(LoadRequest("tiny", 7, 3, seed=0, format=streamed), due_s=0.0)
    seconds = iter(range(100_000))
    reader = AnswerReader(answer, lambda: float(next(seconds)))
    assert [reader.feed(part) for part in parts] == [False] * (len(parts) - 1) + [True]
    return answer


@of_each_api
def test_each_token_is_recorded_at_its_arrival(endpoint: Endpoint, streamed: StreamFormat) -> None:
    events = stream_of(call_of(endpoint), Ending.LENGTH)
    answer = read(streamed, HEAD, *chunked(*events))
    assert (answer.failure, answer.prompt_tokens) == ("", 7)
    assert (answer.deltas_s, answer.events) == ([1.0, 2.0, 3.0], [1, 1, 1])
    whole = HEAD + b"".join(chunked(*events))
    singly = read(streamed, *(whole[at : at + 1] for at in range(len(whole))))
    assert (singly.failure, singly.events) == ("", [1, 1, 1])


@of_each_api
def test_an_answer_that_ends_early_or_breaks_off_is_incomplete(
    endpoint: Endpoint, streamed: StreamFormat
) -> None:
    call = call_of(endpoint)
    stopped = read(streamed, HEAD, *chunked(*stream_of(call, Ending.STOP)))
    assert stopped.failure == "not 3 tokens"
    first, *_ = stream_of(call, Ending.LENGTH)
    assert read(streamed, HEAD, *chunked(first)).failure == "the stream broke off"
    failed = failed_event(call, 3, GenerationFailed("The step failed."))
    assert read(streamed, HEAD, *chunked(first, failed)).failure == "mid-stream: generation_failed"
