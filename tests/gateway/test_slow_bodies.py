"""Requests whose bodies arrive slowly or never, and their effect on other requests."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lorikeet.gateway import body
from tests.gateway.conftest import Gateway, chat, serving
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.waiting import eventually

DEADLINE_S = 0.5


@contextmanager
def unfinished(gateway: Gateway, tenant: str, sockets: int) -> Iterator[list[socket.socket]]:
    """Open requests of which one byte of 1,000 has arrived."""
    address = httpx.URL(gateway.url)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {address.host}\r\ncontent-length: 1000\r\n"
        f"authorization: Bearer {gateway.keys[tenant]}\r\n\r\n{{"
    )
    opened = []
    try:
        for _ in range(sockets):
            opened.append(socket.create_connection((address.host, address.port or 80), timeout=10))
            opened[-1].sendall(head.encode())
        yield opened
    finally:
        for each in opened:
            each.close()


def answer_on(connection: socket.socket) -> httpx.Response:
    """Return the gateway's response before it closes a connection."""
    received = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, content = received.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    return httpx.Response(int(lines[0].split()[1]), headers=headers, content=content)


def test_a_body_that_does_not_arrive_times_out(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_S", DEADLINE_S)
    with unfinished(gateway, "acme", 1) as (connection,):
        error = error_of(answer_on(connection), 408)
    assert (error["code"], error["type"]) == ("request_timeout", "invalid_request_error")
    assert "too slowly, 1 bytes in time: send all of it within 0.5 s" in error["message"]


def test_the_gateways_time_for_a_part_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "BODY_S", 1.0)

    async def parts() -> AsyncIterator[bytes]:
        for part in (b"a", b"b", b"c"):
            await asyncio.sleep(0.01)
            yield part

    async def taken() -> bytes:
        received = b""
        async for part in body.timed_parts(parts()):
            await asyncio.sleep(0.4)
            received += part
        return received

    assert asyncio.run(taken()) == b"abc"


def test_a_body_that_arrives_fast_enough_may_take_longer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_S", DEADLINE_S)
    monkeypatch.setattr(body, "LEAST_BYTES_PER_S", 16)

    def slowly() -> Iterator[bytes]:
        content = httpx.Request("POST", gateway.url, json=chat("tiny")).content
        for at in range(0, len(content), 20):
            yield content[at : at + 20]
            time.sleep(0.2)

    headers = {"authorization": f"Bearer {gateway.keys['acme']}"}
    assert httpx.post(gateway.url + CHAT, content=slowly(), headers=headers).status_code == 200


def test_bodies_that_never_arrive_occupy_only_their_tenants_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_S", 4 * DEADLINE_S)
    with serving(tmp_path) as gateway:
        gateway.add_tenant("small", max_concurrent=1)
        with unfinished(gateway, "small", 100):
            assert eventually(lambda: gateway.post(CHAT, chat("tiny"), "small").status_code == 429)
            assert gateway.post(CHAT, chat("tiny")).status_code == 200
            assert eventually(lambda: gateway.post(CHAT, chat("tiny"), "small").status_code == 200)


def test_a_client_that_disconnects_in_mid_body_frees_its_slot(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        gateway.add_tenant("small", max_concurrent=1)
        with unfinished(gateway, "small", 1):
            assert eventually(lambda: gateway.post(CHAT, chat("tiny"), "small").status_code == 429)
        assert eventually(lambda: gateway.post(CHAT, chat("tiny"), "small").status_code == 200)


def test_a_refused_body_frees_its_slot(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        gateway.add_tenant("small", max_concurrent=1)
        for bad in (b"{", chat("nobody/nothing"), chat("tiny", n=0)):
            assert gateway.post(CHAT, bad, "small").status_code in (400, 404)
        assert gateway.post(CHAT, chat("tiny"), "small").status_code == 200


def test_arriving_bodies_of_a_tenant_without_limits_leave_slots_for_others(tmp_path: Path) -> None:
    with serving(tmp_path, max_open_requests=16) as gateway, unfinished(gateway, "acme", 40):
        assert eventually(lambda: gateway.post(CHAT, chat("tiny")).status_code == 429)
        for _ in range(5):
            assert gateway.post(CHAT, chat("tiny"), "globex").status_code == 200
