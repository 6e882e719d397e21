"""Bounds on a request ahead of the application, on Serve's HTTP port and on the admin listener."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from starlette.responses import JSONResponse, Response

from lorikeet.addresses import Address
from lorikeet.gateway import http_protocol
from lorikeet.gateway.http_protocol import BoundedHttpProtocol
from lorikeet.gateway.listeners import AdminListener
from lorikeet.serving.proxy_middleware import middlewares
from tests.waiting import eventually

HEAD = b"POST /read HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
SHORT_S = 0.2


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    @app.post("/refuse")
    async def refuse() -> Response:
        return JSONResponse({"refused": True}, 401)

    @app.get("/")
    async def root() -> str:
        return "fine"

    return app


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def in_loop(run: Any) -> Iterator[None]:
    """Run `run(stop)` in an event loop of its own thread, until the context ends."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run(stop)))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@contextmanager
def serves_port() -> Iterator[int]:
    port = free_port()

    async def run(stop: asyncio.Event) -> None:
        options = HTTPOptions(host="127.0.0.1", port=port)
        options.middlewares.extend(middlewares())
        loop = asyncio.get_running_loop()
        serving, server = await start_asgi_http_server(application(), options, event_loop=loop)
        await stop.wait()
        server.force_exit = server.should_exit = True
        await serving

    with in_loop(run):
        yield port


@contextmanager
def admin_port() -> Iterator[int]:
    port = free_port()

    async def run(stop: asyncio.Event) -> None:
        app = application()
        AdminListener(Address("127.0.0.1", port)).open_with(app)
        async with app.router.lifespan_context(app):
            await stop.wait()

    with in_loop(run):
        yield port


@pytest.fixture(params=[serves_port, admin_port], ids=["serve", "admin"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with request.param() as port:
        assert eventually(lambda: connects(port))
        yield port


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def received(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    parts = list[bytes]()
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def answer_until(connection: socket.socket, end: bytes, count: int = 1) -> bytes:
    """Return what arrives until `end` has arrived `count` times."""
    answer = b""
    while answer.count(end) < count:
        part = connection.recv(2**16)
        assert part, answer
        answer += part
    return answer


def refusal(answer: bytes) -> tuple[int, str]:
    """Return status and message of a refusal, which closes the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def ask(port: int) -> bytes:
    with connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return received(connection)


def chunks(count: int, size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, b"a" * size) * count


def test_a_body_in_very_small_parts_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_PARTS", 100)
    with connected(port) as connection:
        connection.sendall(HEAD + CHUNKED + chunks(200, 1))
        status, message = refusal(received(connection))
    assert status == 400
    assert "send it in larger parts" in message
    assert b"fine" in ask(port)


def test_a_body_in_larger_parts_passes(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_PARTS", 100)
    with connected(port) as connection:
        connection.sendall(HEAD + b"connection: close\r\n" + CHUNKED + chunks(300, 512))
        connection.sendall(b"0\r\n\r\n")
        assert received(connection).endswith(str(300 * 512).encode())


def test_chunk_extensions_count_as_bytes_beside_the_body(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 4096)
    with connected(port) as connection:
        connection.sendall(HEAD + CHUNKED)
        connection.sendall((b"1;%s\r\na\r\n" % (b"x" * 200)) * 50)
        assert refusal(received(connection))[0] == 413


def test_trailers_count_as_headers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEADERS", 50)
    with connected(port) as connection:
        connection.sendall(HEAD + CHUNKED + b"1\r\na\r\n0\r\n" + b"a: b\r\n" * 100)
        status, message = refusal(received(connection))
    assert (status, "more than 50 headers" in message) == (413, True)


@pytest.mark.parametrize("lines", [b"a: b\r\n" * 100, b"a: " + b"b" * 9000], ids=["many", "long"])
def test_headers_without_end_are_refused(
    lines: bytes, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEADERS", 50)
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 4096)
    with connected(port) as connection:
        connection.sendall(HEAD)
        connection.sendall(lines)
        assert refusal(received(connection))[0] == 413


@pytest.mark.parametrize("sent", [b"", b"\r\n", HEAD], ids=["nothing", "an empty line", "headers"])
def test_a_connection_without_a_whole_head_is_closed(
    sent: bytes, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", SHORT_S)
    began_s = time.monotonic()
    with connected(port) as connection:
        connection.sendall(sent)
        answer = received(connection)
    assert SHORT_S / 2 < time.monotonic() - began_s < 5
    assert not answer if sent != HEAD else refusal(answer)[0] == 408


@pytest.mark.parametrize("answered", [False, True], ids=["at first", "after an answer"])
@pytest.mark.parametrize(
    ("begin", "dripped"), [(b"GET / HTTP/1.1\r\n", b"a"), (b"", b"\r\n")], ids=["header", "lines"]
)
def test_a_trickle_of_headers_is_closed(
    begin: bytes, dripped: bytes, answered: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", SHORT_S)
    with connected(port) as connection:
        if answered:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer_until(connection, b"fine")
        connection.sendall(begin)
        began_s = time.monotonic()
        closed = eventually(lambda: not trickles(connection, dripped), within_s=5)
    assert closed
    assert time.monotonic() - began_s >= SHORT_S / 2


def trickles(connection: socket.socket, dripped: bytes) -> bool:
    """Send a few bytes of a request's head; return whether the connection is open."""
    time.sleep(0.02)
    connection.settimeout(0.01)
    try:
        connection.sendall(dripped)
        connection.recv(2**16)
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


@pytest.mark.parametrize(
    "head", [CHUNKED, b"content-length: 100000000\r\n\r\n"], ids=["chunked", "large"]
)
def test_an_answer_before_the_end_of_a_body_closes_the_connection(head: bytes, port: int) -> None:
    with connected(port) as connection:
        connection.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\n" + head + b"5\r\naaaaa\r\n")
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 401")
        assert answer.count(b"connection: close") == 1
        for _ in range(20):  # reads of a client that sends on are dropped, not parsed
            connection.sendall(b"a" * 1000)


def test_a_small_body_may_follow_its_answer(port: int) -> None:
    with connected(port) as connection:
        for _ in range(3):
            connection.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
            assert b"connection: close" not in answer_until(connection, b"}")
            connection.sendall(b"a" * 10)


def test_a_small_body_that_never_follows_its_answer_closes_the_connection(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", SHORT_S)
    with connected(port) as connection:
        connection.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\naaa")
        assert received(connection).startswith(b"HTTP/1.1 401")


def test_a_refused_client_that_waits_for_100_continue_is_closed(port: int) -> None:
    expects = b"content-length: 10\r\nexpect: 100-continue\r\n\r\n"
    with connected(port) as connection:
        connection.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\n" + expects)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer


def test_requests_in_a_pipeline_are_bounded(port: int) -> None:
    one = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with connected(port) as connection:
        connection.sendall(one * http_protocol.MAX_PIPELINED)
        answer_until(connection, b"fine", http_protocol.MAX_PIPELINED)
        connection.sendall(one * (4 * http_protocol.MAX_PIPELINED))
        assert received(connection).count(b"fine") < 4 * http_protocol.MAX_PIPELINED


def test_small_packets_are_read_at_a_bounded_rate(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_FREE_READS", 5)
    reads = list[int]()
    received_by = http_protocol.BoundedHttpProtocol.data_received

    def counted(self: http_protocol.BoundedHttpProtocol, data: bytes) -> None:
        reads.append(len(data))
        received_by(self, data)

    monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "data_received", counted)
    began_s = time.monotonic()
    with connected(port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HEAD + b"connection: close\r\ncontent-length: 400\r\n\r\n")
        for _ in range(400):
            connection.sendall(b"a")
            time.sleep(0.0005)
        assert received(connection).endswith(b"400")
    took_s = time.monotonic() - began_s
    assert len(reads) <= 10 + took_s / http_protocol._READ_PAUSE_S


def test_large_bodies_pass_whole(port: int) -> None:
    size = 3 * 2**20 + 1
    with connected(port) as connection:
        connection.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size)
        connection.sendall(b"a" * size)
        assert received(connection).endswith(str(size).encode())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Maximum number of connections of a listener."""
    monkeypatch.setattr(BoundedHttpProtocol, "max_connections", 3)
    return 3


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_beyond_the_limit_the_connection_that_is_idle_longest_is_closed(
    port: int, few: int
) -> None:
    with ExitStack() as opened:
        idle = [opened.enter_context(connected(port)) for _ in range(few)]
        for each in (*idle, idle[0]):  # at last, the second is idle longest
            each.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer_until(each, b'"fine"')
        idle[1].sendall(HEAD)  # headers without end are idle too
        assert not any(map(is_closed, idle))
        assert b'"fine"' in ask(port)
        assert [is_closed(each) for each in idle] == [False, True, False]


def test_connections_whose_requests_are_being_answered_are_not_closed(port: int, few: int) -> None:
    with ExitStack() as opened:
        busy = [opened.enter_context(connected(port)) for _ in range(few)]
        for each in busy:
            each.sendall(HEAD + b"content-length: 4\r\n\r\n12")
        time.sleep(SHORT_S)
        with connected(port) as refused:
            answer = received(refused)
            assert refusal(answer) == (
                503,
                "all connections of this server are in use: try again later",
            )
            assert b"retry-after: 1\r\n" in answer
        for each in busy:
            each.sendall(b"34")
            assert answer_until(each, b"\r\n\r\n4")
        assert b'"fine"' in ask(port)


def test_the_limit_on_connections_leaves_other_files_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "max_connections", 0)
    monkeypatch.setattr(http_protocol.resource, "getrlimit", lambda _: (1024, 4096))
    BoundedHttpProtocol.limit_connections(16_384)
    assert BoundedHttpProtocol.max_connections == 768
    BoundedHttpProtocol.limit_connections(100)
    assert BoundedHttpProtocol.max_connections == 100


def test_serves_listener_takes_the_limit_from_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "max_connections", 0)
    monkeypatch.setenv("LORIKEET_MAX_CONNECTIONS", "77")
    monkeypatch.setenv("LORIKEET_UNKNOWN", "for the gateway to refuse")
    middlewares()
    assert BoundedHttpProtocol.max_connections == 77
