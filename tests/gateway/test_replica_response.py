"""ASGI messages of an answer, each of which is one write to the client's connection."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from lorikeet.errors import GenerationFailed
from lorikeet.gateway.replica_response import ReplicaResponse
from lorikeet.protocol.messages import AnswerHeader, Call, Endpoint, FinalUsage, StreamItem

HEADER = AnswerHeader("r0", None, None, load_s=0.0)
USAGE = FinalUsage(3, 0, 2)
FIRST, DELTA, END = b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"


def sent(*items: StreamItem | Exception) -> list[dict[str, Any]]:
    """Return the messages of a stream of these items. An exception as last item is raised."""
    messages = list[dict[str, Any]]()

    async def stream() -> AsyncGenerator[StreamItem, None]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        messages.append(message)

    call = Call("a" * 32, Endpoint.CHAT, 0, "acme", "tiny", None, stream=True)
    asyncio.run(ReplicaResponse(call, stream(), [], 60.0)({}, receive, send))
    return messages


def test_a_streams_last_events_are_sent_with_its_end() -> None:
    start, *bodies = sent(HEADER, FIRST, DELTA, USAGE, END)
    assert start["type"] == "http.response.start"
    assert [(each["body"], each["more_body"]) for each in bodies] == [
        (FIRST, True),
        (DELTA, True),
        (END, False),
    ]


def test_an_answer_that_is_ready_at_once_is_one_message() -> None:
    _, *bodies = sent(HEADER, USAGE, FIRST + END)
    assert [(each["body"], each["more_body"]) for each in bodies] == [(FIRST + END, False)]


def test_parts_of_the_last_events_are_sent_together() -> None:
    _, *bodies = sent(HEADER, FIRST, USAGE, DELTA, END)
    assert [each["body"] for each in bodies] == [FIRST, DELTA + END]


def test_a_stream_that_fails_ends_with_the_error() -> None:
    _, *bodies = sent(HEADER, FIRST, DELTA, GenerationFailed("it broke"))
    assert [each["more_body"] for each in bodies] == [True, True, False]
    assert b"it broke" in bodies[-1]["body"]
