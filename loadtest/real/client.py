"""Clients that keep up with GPUs: processes of bare sockets that note when pieces come.

Nothing of an answer is parsed while it comes, so one process reads some 20,000 pieces a second;
its end is looked at afterwards, and an answer counts only if it is whole.
"""

import asyncio
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np

_TEXT = b'"text":"'  # in each event with tokens, and in no other
_END = b"0\r\n\r\n"
_KEPT = 4096  # bytes at an answer's end
_LEAD_S = 0.2
_READY_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for a stream of output_tokens tokens. seed: of its prompt's random token ids."""

    model: str
    prompt_tokens: int
    output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Line:
    """Requests one after another, the first at_s seconds after the start."""

    at_s: float
    asks: tuple[Ask, ...]


@dataclass(slots=True)
class Answer:
    """What became of a request. Seconds from the start.

    due_s: when it was to be sent, sent_s: when it was. pieces_s: when tokens came, one or several
    at a time. failure: "" if the answer is whole and of as many tokens as were asked for.
    """

    ask: Ask
    due_s: float
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    request_id: str = ""
    replica: str = ""
    residency: str = ""
    failure: str = ""


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


def prompt_of(ask: Ask, vocabulary: int) -> list[int]:
    """Token ids at random; nobody has computed them before."""
    rng = np.random.default_rng([ask.seed, ask.prompt_tokens])
    ids: list[int] = rng.integers(0, vocabulary, ask.prompt_tokens).tolist()
    return ids


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99; None of nothing."""
    if not len(seconds):
        return {"p50": None, "p90": None, "p99": None}
    found = np.percentile(np.asarray(seconds), [50, 90, 99]) * 1e3
    return dict(zip(("p50", "p90", "p99"), (round(float(ms), 2) for ms in found), strict=True))


def _client(pipe: Connection, server: Server, lines: Sequence[Line]) -> None:
    """What a process does: prepare, wait for the start, ask, answer."""
    requests = {ask: _request(server, ask) for line in lines for ask in line.asks}
    pipe.send("ready")
    start_s = pipe.recv()
    pipe.send(asyncio.run(_ask_all(server, lines, requests, start_s)))


async def _ask_all(
    server: Server, lines: Sequence[Line], requests: dict[Ask, bytes], start_s: float
) -> list[Answer]:
    def now_s() -> float:
        return time.monotonic() - start_s

    address = urlsplit(server.url)
    answers: list[Answer] = []

    async def follow(line: Line) -> None:
        await asyncio.sleep(line.at_s - now_s())
        for number, ask in enumerate(line.asks):
            answer = Answer(ask, now_s() if number else line.at_s)
            answers.append(answer)
            await _ask(address.hostname or "", address.port or 80, requests[ask], answer, now_s)

    await asyncio.gather(*map(follow, lines))
    return answers


async def _ask(
    host: str, port: int, request: bytes, answer: Answer, now_s: Callable[[], float]
) -> None:
    try:
        transport, stream = await asyncio.get_running_loop().create_connection(
            lambda: Stream(request, answer, now_s), host, port
        )
    except OSError as error:
        answer.failure, answer.ended_s = repr(error), now_s()
        return
    await stream.ended
    transport.close()


class Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, answer: Answer, now_s: Callable[[], float]) -> None:
        self._request, self._answer, self._now_s = request, answer, now_s
        self._head = b""
        self._tail = b""
        self._streams = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self._answer.sent_s = self._now_s()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note when tokens come."""
        now_s = self._now_s()
        if not self._streams:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            self._streams = True
            head, _, data = self._head.partition(b"\r\n\r\n")
            self._head = head
        if _TEXT in self._tail[-len(_TEXT) + 1 :] + data:
            self._answer.pieces_s.append(now_s)
        self._tail = (self._tail + data)[-_KEPT:]
        if self._tail.endswith(_END) or not self._head.startswith(b"HTTP/1.1 200"):
            self._end()

    def connection_lost(self, _error: Exception | None) -> None:
        """At the end, or before it."""
        self._end()

    def _end(self) -> None:
        if self.ended.done():
            return
        answer = self._answer
        answer.ended_s = self._now_s()
        answer.request_id = self._header(b"x-request-id")
        answer.replica = self._header(b"x-lorikeet-replica")
        answer.residency = self._header(b"x-lorikeet-residency")
        answer.failure = self._failure()
        self.ended.set_result(None)

    def _header(self, name: bytes) -> str:
        found = re.search(rb"\r\n" + name + rb": *([^\r]*)", self._head, re.IGNORECASE)
        return found[1].decode() if found else ""

    def _failure(self) -> str:
        """What is wrong with the answer; "" if nothing is."""
        status, wanted = self._head[:12], self._answer.ask.output_tokens
        if status != b"HTTP/1.1 200":
            return f"{status.decode()}: {self._tail[-300:].decode(errors='replace')}"
        if b"data: [DONE]" not in self._tail:
            return f"cut off: {self._tail[-300:].decode(errors='replace')}"
        made = re.search(rb'"completion_tokens":(\d+)', self._tail)
        if made is None or int(made[1]) != wanted or b'"finish_reason":"length"' not in self._tail:
            return f"not {wanted} tokens: {self._tail[-300:].decode(errors='replace')}"
        return "" if self._answer.pieces_s else "no text"


def _request(server: Server, ask: Ask) -> bytes:
    body = json.dumps(
        {
            "model": ask.model,
            "prompt": prompt_of(ask, server.vocabulary),
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(server.url).netloc}\r\n"
        f"authorization: Bearer {server.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
