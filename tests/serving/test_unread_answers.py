"""Unread answers: bounded in memory and in time."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from lorikeet.serving import proxy_middleware
from lorikeet.serving.proxy_middleware import middlewares

PIECE = b"x" * 2**16
KERNEL_BYTES = 2**24
"""More than two sockets of this machine buffer, and the server before them."""


class Endless:
    """Application that streams without end, and notes when its client has gone."""

    def __init__(self, pieces_per_s: float = 1e6) -> None:
        self.pause_s = 1 / pieces_per_s
        self.made_bytes = 0
        self.stopped = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.made_bytes += len(PIECE)
            await asyncio.sleep(self.pause_s)
        assert (await gone)["type"] == "http.disconnect"
        self.stopped.set()


def whole(size: int) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
        await send({"type": "http.response.body"})

    return answer


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """Serve the application behind the middleware, as Serve's proxy does; yield the port."""
    for middleware in middlewares():  # the last is outermost, as Serve applies them
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = server.force_exit = True
        await running


@contextlib.asynccontextmanager
async def asking(port: int) -> AsyncIterator[asyncio.StreamReader]:
    """Yield the reader of a client that has sent a request, with a buffer of 64 KiB."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        yield reader
    finally:
        writer.close()


def test_an_unread_stream_is_paused_and_then_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_middleware, "STALLED_S", 0.5)

    async def scenario() -> None:
        app = Endless()
        async with serving(app) as port, asking(port):
            await asyncio.wait_for(app.stopped.wait(), 20)
        assert app.made_bytes < KERNEL_BYTES

    asyncio.run(scenario())


def test_a_slow_client_gets_the_whole_of_a_complete_answer() -> None:
    async def scenario() -> None:
        size, pieces = 2**18, 3 * KERNEL_BYTES // 2**18

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(pieces):
                await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
            await send({"type": "http.response.body"})

        async with serving(answer) as port, asking(port) as reader:
            read = b""
            while not read.endswith(b"0\r\n\r\n"):
                await asyncio.sleep(0.002)
                read += await asyncio.wait_for(reader.read(2**20), 20)
            assert read.count(b"x") == pieces * size

    asyncio.run(scenario())


def test_a_stream_that_is_read_continues() -> None:
    async def scenario() -> None:
        app = Endless(pieces_per_s=500)
        async with serving(app) as port, asking(port) as reader:
            read_bytes = 0
            while read_bytes < 3 * KERNEL_BYTES:
                read_bytes += len(await asyncio.wait_for(reader.read(2**20), 20))
            assert not app.stopped.is_set()
        await asyncio.wait_for(app.stopped.wait(), 20)  # its client has gone

    asyncio.run(scenario())


def test_a_complete_answer_may_exceed_the_buffers() -> None:
    async def scenario() -> None:
        size = 8 * 2**20
        async with serving(whole(size)) as port, asking(port) as reader:
            await asyncio.sleep(0.3)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += await asyncio.wait_for(reader.read(2**20), 20)
            assert answer.count(b"x") == size

    asyncio.run(scenario())
