"""HTTP client of all load programs, on bare sockets: one process reads 20,000 deltas a second.

`run_sessions` sends from several processes, `send_all` on the event loop of this process, `send_on`
on a socket of the caller. Only complete answers count (streamed_answer.py).
"""

import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from loadtest.streamed_answer import AnswerReader, Clock, LoadRequest, StreamedAnswer

_LEAD_S = 0.2
_READY_WITHIN_S = 120.0
_WITH_USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Session:
    """Requests sent one after another.

    at_s: start of the first request, seconds after the start of the run.
    """

    at_s: float
    requests: tuple[LoadRequest, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """Address and API key of the service under load.

    vocabulary: exclusive upper bound of token ids in random prompts.
    """

    url: str
    key: str
    vocabulary: int


def run_sessions(
    server: Server, sessions: Sequence[Session], processes: int
) -> list[StreamedAnswer]:
    """Run all sessions from several client processes, and return their answers.

    processes: number of client processes; sessions are dealt round among them.
    Raises RuntimeError if a process ends early.
    """
    context = multiprocessing.get_context("spawn")
    clients = []
    for index in range(processes):
        here, there = context.Pipe()
        target = context.Process(
            target=_client, args=(there, server, sessions[index::processes]), daemon=True
        )
        target.start()
        there.close()
        clients.append((target, here))
    try:
        for _, pipe in clients:
            if not pipe.poll(_READY_WITHIN_S):
                raise RuntimeError(f"a client process did not start within {_READY_WITHIN_S:g} s")
            pipe.recv()
        start_s = time.monotonic() + _LEAD_S
        for _, pipe in clients:
            pipe.send(start_s)
        return [answer for _, pipe in clients for answer in pipe.recv()]
    except EOFError as error:
        raise RuntimeError("a client process ended without returning its answers") from error
    finally:
        for process, pipe in clients:
            pipe.close()
            process.terminate()
            process.join()


async def send_all(
    url: str, sessions: Sequence[Session], requests: Mapping[LoadRequest, bytes], start_s: float
) -> list[StreamedAnswer]:
    """Run all sessions from this process, and return their answers.

    requests: encoded bytes of each request.
    start_s: time.monotonic() at the start of the run.
    """
    host, port = host_and_port(url)
    answers: list[StreamedAnswer] = []

    def now_s() -> float:
        return time.monotonic() - start_s

    async def follow(session: Session) -> None:
        await asyncio.sleep(session.at_s - now_s())
        for number, request in enumerate(session.requests):
            answer = StreamedAnswer(request, now_s() if number else session.at_s)
            answers.append(answer)
            await _send(host, port, requests[request], AnswerReader(answer, now_s))

    await asyncio.gather(*map(follow, sessions))
    return answers


def send_on(
    connection: socket.socket, request: bytes, answer: StreamedAnswer, now_s: Clock
) -> None:
    """Send a request on an open connection, and read its answer.

    The connection may be used again if the answer is complete.
    """
    reader = AnswerReader(answer, now_s)
    try:
        connection.sendall(request)
        while (data := connection.recv(65536)) and not reader.feed(data):
            pass
    except OSError as error:
        reader.fail(error)
    else:
        reader.end()


def encode_requests(server: Server, sessions: Sequence[Session]) -> dict[LoadRequest, bytes]:
    """Encode each request as a completion of random token ids."""
    return {
        request: _completion_request(server, request)
        for session in sessions
        for request in session.requests
    }


def chat_request(
    server: Server, request: LoadRequest, text: str, path: str = "/v1/chat/completions"
) -> bytes:
    """Encode a chat request with this text, for exactly `output_tokens` tokens."""
    wanted = {"max_tokens": request.output_tokens, "min_tokens": request.output_tokens}
    chat = {"model": request.model, "messages": messages(text)}
    return _request(server, path, chat | wanted | _WITH_USAGE)


def messages(text: str) -> list[dict[str, str]]:
    """Return the `messages` field of a chat of one user message."""
    return [{"role": "user", "content": text}]


def response_request(server: Server, request: LoadRequest, text: str) -> bytes:
    """Encode a request to /v1/responses for at most `output_tokens` tokens."""
    wanted = {"max_output_tokens": request.output_tokens}
    return _request(server, "/v1/responses", {"model": request.model, "input": text} | wanted)


def message_request(server: Server, request: LoadRequest, text: str) -> bytes:
    """Encode a request to /v1/messages for at most `output_tokens` tokens."""
    message = {"model": request.model, "messages": messages(text)}
    return _request(server, "/v1/messages", message | {"max_tokens": request.output_tokens})


def random_prompt(request: LoadRequest, vocabulary: int) -> list[int]:
    """Draw the random token ids of a prompt; no prefix cache holds them."""
    rng = np.random.default_rng([request.seed, request.prompt_tokens])
    ids: list[int] = rng.integers(0, vocabulary, request.prompt_tokens).tolist()
    return ids


def host_and_port(url: str) -> tuple[str, int]:
    """Split a URL into its host and port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, reader: AnswerReader) -> None:
        self._request, self._reader = request, reader
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._reader.answer.sent_s = self._reader.now_s()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Feed the bytes to the reader."""
        if self._reader.feed(data) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, _error: Exception | None) -> None:
        """End the answer if it has not ended."""
        if not self.ended.done():
            self._reader.end()
            self.ended.set_result(None)


async def _send(host: str, port: int, request: bytes, reader: AnswerReader) -> None:
    try:
        transport, stream = await asyncio.get_running_loop().create_connection(
            lambda: _Stream(request, reader), host, port
        )
    except OSError as error:
        reader.fail(error)
        return
    await stream.ended
    transport.close()


def _client(pipe: Connection, server: Server, sessions: Sequence[Session]) -> None:
    """Run sessions in a client process: encode their requests, wait for the start, send, return the
    answers.

    pipe: connection to the parent process, which receives "ready", sends the start as
        time.monotonic(), and receives the answers.
    """
    requests = encode_requests(server, sessions)
    pipe.send("ready")
    start_s = pipe.recv()
    pipe.send(asyncio.run(send_all(server.url, sessions, requests, start_s)))


def _completion_request(server: Server, request: LoadRequest) -> bytes:
    body = {
        "model": request.model,
        "prompt": random_prompt(request, server.vocabulary),
        "max_tokens": request.output_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "ignore_eos": True,
    }
    return _request(server, "/v1/completions", body | _WITH_USAGE)


def _request(server: Server, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(server.url).netloc}\r\n"
        f"authorization: Bearer {server.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
