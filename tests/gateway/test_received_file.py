"""A body is written, hashed and scanned as it arrives."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorikeet.gateway.received_file import receive_file
from lorikeet_engine.adapter_format import SCAN_ALIGNMENT


class Seen:
    """Fake ValueScan that records its input."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def take(self, data: memoryview) -> None:
        self.pieces.append(bytes(data))


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as workers:
        yield workers


@pytest.mark.parametrize("part_bytes", [1, 65536 - 517, 5 * 2**20])
@pytest.mark.parametrize("size", [0, 7, 13 * 2**20 + 5])
def test_a_whole_body_is_hashed_written_and_scanned(
    size: int, part_bytes: int, tmp_path: Path, workers: ThreadPoolExecutor
) -> None:
    size = min(size, 2000 * part_bytes + 5)
    body, seen = bytes(range(251)) * (size // 251 + 1), Seen()
    body = body[:size]

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, size, part_bytes):
            yield body[at : at + part_bytes]

    file = tmp_path / "body"
    digest = asyncio.run(receive_file(parts(), file, workers, seen))  # type: ignore[arg-type]
    assert digest == hashlib.sha256(body).hexdigest()
    assert file.read_bytes() == b"".join(seen.pieces) == body
    assert all(len(piece) % SCAN_ALIGNMENT == 0 for piece in seen.pieces[:-1])
    assert all(seen.pieces)


def test_pieces_are_megabytes_and_the_first_has_a_whole_header(
    tmp_path: Path, workers: ThreadPoolExecutor
) -> None:
    seen = Seen()

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10 * 2**4):
            yield bytes(2**16)

    asyncio.run(receive_file(parts(), tmp_path / "body", workers, seen))  # type: ignore[arg-type]
    assert [len(piece) for piece in seen.pieces] == [2**22, 2**22, 2**21]


def test_no_more_than_some_megabytes_wait_for_the_thread(
    tmp_path: Path, workers: ThreadPoolExecutor
) -> None:
    goes_on, given = threading.Event(), 0

    class Slow(Seen):
        def take(self, data: memoryview) -> None:
            super().take(data)
            goes_on.wait(10)

    async def parts() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(40):
            given += 2**20
            yield bytes(2**20)
            await asyncio.sleep(0)

    async def receive() -> int:
        body = receive_file(parts(), tmp_path / "body", workers, Slow())  # type: ignore[arg-type]
        receiving = asyncio.create_task(body)
        await asyncio.sleep(0.2)
        waiting = given
        goes_on.set()
        await receiving
        return waiting

    assert asyncio.run(receive()) <= 10 * 2**20
    assert given == 40 * 2**20
