"""What a client does not read takes a bounded place for a bounded time."""

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
    """An application that makes an answer without end, and notes when its client has gone."""

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
    """The port of a server with the application behind the middleware, as in front of Serve."""
    for middleware in reversed(middlewares()):
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
    """A client that has sent a request, and reads 64 KiB at most unless it is read from."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        yield reader
    finally:
        writer.close()


def test_a_stream_that_nobody_reads_is_held_back_and_cut_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_middleware, "STALLED_S", 0.5)

    async def scenario() -> None:
        app = Endless()
        async with serving(app) as port, asking(port):
            await asyncio.wait_for(app.stopped.wait(), 20)
        assert app.made_bytes < KERNEL_BYTES

    asyncio.run(scenario())


def test_a_client_that_reads_slowly_gets_all_of_an_answer_that_is_there_at_once() -> None:
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


def test_a_stream_that_is_read_as_it_comes_goes_on() -> None:
    async def scenario() -> None:
        app = Endless(pieces_per_s=500)
        async with serving(app) as port, asking(port) as reader:
            read_bytes = 0
            while read_bytes < 3 * KERNEL_BYTES:
                read_bytes += len(await asyncio.wait_for(reader.read(2**20), 20))
            assert not app.stopped.is_set()
        await asyncio.wait_for(app.stopped.wait(), 20)  # its client has gone

    asyncio.run(scenario())


def test_a_whole_answer_may_be_larger_than_what_may_wait() -> None:
    async def scenario() -> None:
        size = 8 * 2**20
        async with serving(whole(size)) as port, asking(port) as reader:
            await asyncio.sleep(0.3)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += await asyncio.wait_for(reader.read(2**20), 20)
            assert answer.count(b"x") == size

    asyncio.run(scenario())
