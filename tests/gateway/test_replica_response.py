"""ASGI messages of an answer, each of which is one write to the client's connection."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lorikeet.errors import GenerationFailed, Overloaded
from lorikeet.gateway import client_connection
from lorikeet.gateway.replica_response import ReplicaResponse
from lorikeet.protocol.messages import AnswerHeader, Call, Endpoint, FinalUsage, StreamItem

HEADER = AnswerHeader("r0", None, None, load_s=0.0)
USAGE = FinalUsage(3, 0, 2)
FIRST, DELTA, END = b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"


def sent(
    *items: StreamItem | Exception | float, endpoint: Endpoint = Endpoint.CHAT
) -> list[dict[str, Any]]:
    """Return the messages of a stream of these items.

    An exception is raised, and a number is a pause in seconds.
    """
    messages = list[dict[str, Any]]()

    async def stream() -> AsyncGenerator[StreamItem, None]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                yield item

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        messages.append(message)

    call = Call("a" * 32, endpoint, 0, "acme", "tiny", None, stream=True)
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


@pytest.fixture
def idle_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the silence after which a keep-alive event is sent; return two such silences."""
    monkeypatch.setattr(client_connection, "KEEP_ALIVE_S", 0.1)
    return 0.25


def test_a_stream_that_waits_for_its_first_bytes_is_kept_alive(idle_s: float) -> None:
    start, *bodies = sent(HEADER, idle_s, FIRST, USAGE, END)
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    kept = b": keep-alive\n\n"
    assert [each["body"] for each in bodies] == [kept, kept, FIRST, END]


def test_a_stream_that_pauses_is_kept_alive_between_its_events(idle_s: float) -> None:
    _, *bodies = sent(HEADER, FIRST, idle_s, b"data: a half", idle_s, b"\n\n", USAGE, END)
    kept = b": keep-alive\n\n"
    assert b"".join(each["body"] for each in bodies) == b"".join(
        (FIRST, kept, kept, b"data: a half\n\n", END)
    )


def test_messages_are_kept_alive_by_anthropics_ping(idle_s: float) -> None:
    _, first, *_ = sent(HEADER, idle_s, FIRST, USAGE, END, endpoint=Endpoint.MESSAGES)
    assert first["body"] == b'event: ping\ndata: {"type": "ping"}\n\n'


def test_a_failure_behind_a_keep_alive_event_is_an_error_event(idle_s: float) -> None:
    _, kept, failed = sent(HEADER, idle_s / 2, Overloaded("too much to do"))
    assert kept["body"].startswith(b":")
    assert b"too much to do" in failed["body"]
    assert not failed["more_body"]


def test_a_failure_before_a_keep_alive_event_keeps_its_status() -> None:
    with pytest.raises(Overloaded):
        sent(HEADER, Overloaded("too much to do"))


def test_nothing_is_sent_before_a_replica_has_accepted_the_request(idle_s: float) -> None:
    with pytest.raises(Overloaded):
        sent(idle_s, Overloaded("too much to do"))
