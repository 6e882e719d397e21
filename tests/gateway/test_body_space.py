"""Disk space of bodies that are arriving: claims, shares of tenants, and displacement."""

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from lorikeet.catalog.records import Scope
from lorikeet.errors import Overloaded, StoreError
from lorikeet.gateway.pushing import push_folders
from lorikeet.gateway.pushing.body_space import BodySpace
from tests.gateway.conftest import Gateway
from tests.gateway.trainer import Trainer, digest_of
from tests.waiting import eventually

GIB = 2**30


class Sender:
    """Sender of bodies into the space of one gateway, each in a task of its own."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.space = BodySpace(lambda: self.free_bytes)
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(
        self, tenant: str, size_bytes: int = GIB, received: int = 0
    ) -> asyncio.Task[None]:
        """Begin a body and return its task, which lasts until it is cancelled or displaced."""

        async def arrive() -> None:
            async with self.space.claimed(tenant, size_bytes) as body:
                body.received = received
                self.free_bytes -= received
                await asyncio.Event().wait()

        task = asyncio.create_task(arrive())
        self.tasks.append(task)
        for _ in range(5):
            await asyncio.sleep(0)
        return task


def run(scenario: Callable[[Sender], object], free_bytes: int = 4 * GIB) -> None:
    async def inside() -> None:
        sender = Sender(free_bytes)
        try:
            await scenario(sender)  # type: ignore[misc]
        finally:
            for task in sender.tasks:
                task.cancel()
            await asyncio.gather(*sender.tasks, return_exceptions=True)
            assert sender.space._arriving == []

    asyncio.run(inside())


def refused(task: asyncio.Task[None]) -> bool:
    return task.done() and isinstance(task.exception(), Overloaded)


def test_a_tenant_displaces_the_slowest_body_of_one_beyond_its_share() -> None:
    async def scenario(sender: Sender) -> None:
        slow = [await sender.begin("acme", received=1000 - number) for number in range(4)]
        quick = await sender.begin("globex")
        assert [refused(each) for each in slow] == [False, False, False, True]
        with pytest.raises(Overloaded, match="arrived slowest, 997 bytes"):
            slow[3].result()
        assert not quick.done()

    run(scenario)


def test_a_tenant_beyond_its_share_is_refused_and_displaces_nobody() -> None:
    async def scenario(sender: Sender) -> None:
        own = [await sender.begin("acme") for _ in range(3)]
        other = await sender.begin("globex")
        assert refused(await sender.begin("acme"))
        assert not any(each.done() for each in (*own, other))

    run(scenario)


def test_tenants_within_their_shares_keep_them() -> None:
    async def scenario(sender: Sender) -> None:
        tasks = [await sender.begin(tenant) for tenant in ("acme", "acme", "globex", "globex")]
        assert refused(await sender.begin("initech", 2 * GIB)) is False
        assert sum(refused(each) for each in tasks) == 2  # of each one: all have a third
        assert {refused(tasks[0]) or refused(tasks[1]), refused(tasks[2]) or refused(tasks[3])} == {
            True
        }

    run(scenario)


def test_a_tenant_alone_may_claim_all_of_the_space_and_no_more() -> None:
    async def scenario(sender: Sender) -> None:
        own = [await sender.begin("acme") for _ in range(4)]
        assert refused(await sender.begin("acme"))
        assert not any(each.done() for each in own)
        own[0].cancel()
        await asyncio.sleep(0)
        assert not (await sender.begin("acme")).done()

    run(scenario)


def test_bytes_that_have_arrived_are_not_claimed_twice() -> None:
    async def scenario(sender: Sender) -> None:
        first = await sender.begin("acme", 2 * GIB, received=2 * GIB - 1)
        second = await sender.begin("globex", 2 * GIB)
        assert not first.done()
        assert not second.done()

    run(scenario)


def test_a_body_larger_than_the_disk_has_room_for_is_a_fault_of_the_disk() -> None:
    async def scenario(sender: Sender) -> None:
        task = await sender.begin("acme", 5 * GIB)
        with pytest.raises(StoreError, match="LORIKEET_CACHE_DIR"):
            task.result()

    run(scenario)


def test_the_bodys_own_timeouts_stay_what_they_are() -> None:
    async def late() -> None:
        async with BodySpace(lambda: GIB).claimed("acme", 1):
            raise TimeoutError("the client's own")

    with pytest.raises(TimeoutError, match="the client's own"):
        asyncio.run(late())


def test_a_slow_push_is_told_why_it_had_to_make_room(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(gateway)
    blob = trainer.blob()
    disk = SimpleNamespace(free=len(blob) + 100)
    monkeypatch.setattr(push_folders.shutil, "disk_usage", lambda _: disk)
    _, other = gateway.catalog.create_key(
        "globex", {Scope.PUBLISH}, adapters=("policy*",), actor="test"
    )
    with push_slowly(gateway, trainer.key, blob) as slow:
        assert eventually(lambda: error_code(trainer.push(blob)) == "overloaded")
        assert eventually(lambda: trainer.push(blob, key=other).is_success)
        slow.settimeout(20)
        answer = slow.recv(2**16).decode()
    assert answer.startswith("HTTP/1.1 503")
    assert "arrived slowest" in answer
    assert "retry-after: 5" in answer
    assert trainer.push(blob).is_success


def push_slowly(gateway: Gateway, key: str, blob: bytes) -> socket.socket:
    """Send the head and the first 100 bytes of a push; return its connection."""
    at = urlsplit(gateway.url)
    connection = socket.create_connection((at.hostname or "", at.port or 0))
    head = (
        f"PUT /v1/adapters/policy-slow/versions/{digest_of(blob)} HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(blob)}\r\n\r\n"
    )
    connection.sendall(head.encode() + blob[:100])
    return connection


def error_code(answer: httpx.Response) -> str | None:
    code: str | None = answer.json().get("error", {}).get("code")
    return code
