"""Answers to the lines of batches: each line passes through the gateway as a request of its own."""

import asyncio
import json
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from lorikeet.batch_store import BatchRecord, LineTokens
from lorikeet.gateway.usage_observer import UsageObserver
from lorikeet.protocol.messages import FinalUsage


class Answered(NamedTuple):
    """Answer to one line, which is a request of a batch.

    request_id: id of the request, as in the header x-request-id.
    body: JSON without newlines.
    retry_after_s: value of the header Retry-After; None without it.
    tokens: tokens of a complete answer.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None
    tokens: LineTokens = LineTokens()

    @property
    def code(self) -> str | None:
        """Code of the error; None if the answer is no error."""
        return json.loads(self.body)["error"]["code"] if self.status >= 400 else None


async def answer_line(app: ASGIApp, batch: BatchRecord, body: bytes) -> Answered:
    """Return the answer to a request of a batch.

    app: application of the endpoints for batches (gateway/app.py), which finds in the request's
        state the id of the key that made the batch, and leaves the answer's usage there.
    body: JSON body of the request.
    """
    sent = iter([body])
    started: Message = {}
    parts = list[bytes]()

    async def receive() -> Message:
        for part in sent:
            return {"type": "http.request", "body": part, "more_body": False}
        await asyncio.Event().wait()  # the client never disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    state: dict[str, Any] = {"batch_key": batch.key_id}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": batch.endpoint,
        "raw_path": batch.endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": state,
    }
    await app(scope, receive, send)
    headers = {name.lower(): value.decode() for name, value in started["headers"]}
    wait = headers.get(b"retry-after")
    retry_after_s = None if wait is None else float(wait)
    counted: UsageObserver | None = state.get("usage")
    used = None if counted is None else counted.complete
    tokens = LineTokens() if used is None else _tokens_of(used)
    request_id = headers[b"x-request-id"]
    return Answered(started["status"], request_id, b"".join(parts), retry_after_s, tokens)


def _tokens_of(used: FinalUsage) -> LineTokens:
    return LineTokens(
        used.prompt_tokens, used.cached_tokens, used.completion_tokens, used.reasoning_tokens
    )
