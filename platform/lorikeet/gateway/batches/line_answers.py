"""Answers to the lines of batches: each line passes through the gateway as a request of its own."""

import asyncio
import json
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from lorikeet.batch_store import BatchRecord


class Answered(NamedTuple):
    """Answer to one line, which is a request of a batch.

    request_id: id of the request, as in the header x-request-id.
    body: JSON without newlines.
    retry_after_s: value of the header Retry-After; None without it.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None

    @property
    def code(self) -> str | None:
        """Code of the error; None if the answer is no error."""
        return json.loads(self.body)["error"]["code"] if self.status >= 400 else None


async def answer_line(app: ASGIApp, batch: BatchRecord, body: bytes) -> Answered:
    """Return the answer to a request of a batch.

    app: application of the endpoints for batches (gateway/app.py), which finds in the request's
        state the id of the key that made the batch.
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
        "state": {"batch_key": batch.key_id},
    }
    await app(scope, receive, send)
    headers = {name.lower(): value.decode() for name, value in started["headers"]}
    wait = headers.get(b"retry-after")
    retry_after_s = None if wait is None else float(wait)
    return Answered(started["status"], headers[b"x-request-id"], b"".join(parts), retry_after_s)
