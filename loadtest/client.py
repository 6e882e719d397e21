"""The client of all load programs: bare sockets, by which a process reads 20,000 pieces a second.

`run` asks from several processes, `ask_all` on this one's event loop, `ask_on` on a socket that the
caller has. An answer counts only if it is whole (answer.py).
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

from loadtest.answer import Answer, Ask, Clock, Reader

_LEAD_S = 0.2
_READY_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Line:
    """Requests one after another, the first at_s seconds after the start."""

    at_s: float
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask, and for what kind of prompts. vocabulary: token ids are below it."""

    url: str
    key: str
    vocabulary: int


def run(server: Server, lines: Sequence[Line], processes: int) -> list[Answer]:
    """All of them, from so many processes. Raises RuntimeError when one of these ends early."""
    context = multiprocessing.get_context("spawn")
    clients = []
    for index in range(processes):
        here, there = context.Pipe()
        target = context.Process(
            target=_client, args=(there, server, lines[index::processes]), daemon=True
        )
        target.start()
        there.close()
        clients.append((target, here))
    try:
        for _, pipe in clients:
            if not pipe.poll(_READY_WITHIN_S):
                raise RuntimeError("a client did not start")
            pipe.recv()
        start_s = time.monotonic() + _LEAD_S
        for _, pipe in clients:
            pipe.send(start_s)
        return [answer for _, pipe in clients for answer in pipe.recv()]
    except EOFError as error:
        raise RuntimeError("a client ended without its answers") from error
    finally:
        for process, pipe in clients:
            pipe.close()
            process.terminate()
            process.join()


async def ask_all(
    url: str, lines: Sequence[Line], requests: Mapping[Ask, bytes], start_s: float
) -> list[Answer]:
    """All of them, from this process. start_s: time.monotonic() at the start."""
    host, port = address_of(url)
    answers: list[Answer] = []

    def now_s() -> float:
        return time.monotonic() - start_s

    async def follow(line: Line) -> None:
        await asyncio.sleep(line.at_s - now_s())
        for number, ask in enumerate(line.asks):
            answer = Answer(ask, now_s() if number else line.at_s)
            answers.append(answer)
            await _ask(host, port, requests[ask], Reader(answer, now_s))

    await asyncio.gather(*map(follow, lines))
    return answers


def ask_on(connection: socket.socket, request: bytes, answer: Answer, now_s: Clock) -> None:
    """Ask, and read to the answer's end. The connection may be used again if it is whole."""
    reader = Reader(answer, now_s)
    try:
        connection.sendall(request)
        while (data := connection.recv(65536)) and not reader.take(data):
            pass
    except OSError as error:
        reader.lost(error)
    else:
        reader.end()


def requests_of(server: Server, lines: Sequence[Line]) -> dict[Ask, bytes]:
    """Each one's request: a completion of random token ids."""
    return {ask: _completion_request(server, ask) for line in lines for ask in line.asks}


def chat_request(server: Server, ask: Ask, text: str, path: str = "/v1/chat/completions") -> bytes:
    """A request for an answer to the text, of exactly as many tokens as the ask's."""
    wanted = {"max_tokens": ask.output_tokens, "min_tokens": ask.output_tokens}
    messages = [{"role": "user", "content": text}]
    return _request(server, path, {"model": ask.model, "messages": messages, **wanted})


def prompt_of(ask: Ask, vocabulary: int) -> list[int]:
    """Token ids at random; nobody has computed them before."""
    rng = np.random.default_rng([ask.seed, ask.prompt_tokens])
    ids: list[int] = rng.integers(0, vocabulary, ask.prompt_tokens).tolist()
    return ids


def address_of(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, reader: Reader) -> None:
        self._request, self._reader = request, reader
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self._reader.answer.sent_s = self._reader.now_s()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._reader.take(data) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, _error: Exception | None) -> None:
        """At the end, or before it."""
        if not self.ended.done():
            self._reader.end()
            self.ended.set_result(None)


async def _ask(host: str, port: int, request: bytes, reader: Reader) -> None:
    try:
        transport, stream = await asyncio.get_running_loop().create_connection(
            lambda: _Stream(request, reader), host, port
        )
    except OSError as error:
        reader.lost(error)
        return
    await stream.ended
    transport.close()


def _client(pipe: Connection, server: Server, lines: Sequence[Line]) -> None:
    """What a process does: prepare, wait for the start, ask, answer."""
    requests = requests_of(server, lines)
    pipe.send("ready")
    start_s = pipe.recv()
    pipe.send(asyncio.run(ask_all(server.url, lines, requests, start_s)))


def _completion_request(server: Server, ask: Ask) -> bytes:
    wanted = {"max_tokens": ask.output_tokens, "temperature": 0, "ignore_eos": True}
    prompt = prompt_of(ask, server.vocabulary)
    return _request(server, "/v1/completions", {"model": ask.model, "prompt": prompt, **wanted})


def _request(server: Server, path: str, body: dict[str, Any]) -> bytes:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body | streamed).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(server.url).netloc}\r\n"
        f"authorization: Bearer {server.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
