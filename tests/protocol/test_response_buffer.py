"""Deltas are joined only as far as the gateway needs it, and not delayed otherwise."""

import asyncio
from itertools import pairwise

import pytest

from lorikeet.errors import Unavailable
from lorikeet.protocol.messages import AnswerHeader, StreamItem
from lorikeet.protocol.response_stream import DELTAS_PER_S, ResponseBuffer, ResponseBuffers

REST_S = 0.05
HEADER = AnswerHeader("r0", None, None)


async def fill(buffer: ResponseBuffer, deltas: list[bytes], step_s: float) -> None:
    for delta in deltas:
        buffer.put((delta,), ended=False)
        await asyncio.sleep(step_s)
    buffer.put((), ended=True)


async def take_all(rest_s: float, deltas: list[bytes], step_s: float) -> list[tuple[float, bytes]]:
    """Return each taken delta with its time."""
    loop, buffer, taken = (
        asyncio.get_running_loop(),
        ResponseBuffer(lambda: rest_s, bytearray()),
        [],
    )
    filling = loop.create_task(fill(buffer, deltas, step_s))
    while items := await buffer.take():
        (delta,) = items
        assert isinstance(delta, bytes)
        taken.append((loop.time(), delta))
    await filling
    return taken


def test_too_frequent_deltas_are_joined_without_loss() -> None:
    deltas = [b"%d," % number for number in range(40)]
    taken = asyncio.run(take_all(REST_S, deltas, step_s=0.005))
    times_s = [at_s for at_s, _ in taken]
    assert all(b - a >= REST_S * 0.99 for a, b in pairwise(times_s[:-1]))
    assert 3 <= len(taken) <= 2 + (times_s[-1] - times_s[0]) / REST_S
    assert taken[0][1] == b"0,"  # the first came at once
    assert b"".join(delta for _, delta in taken) == b"".join(deltas)


@pytest.mark.parametrize("rest_s", [0.0, 0.001])
def test_infrequent_deltas_are_not_delayed(rest_s: float) -> None:
    deltas = [b"%d," % number for number in range(10)]
    taken = asyncio.run(take_all(rest_s, deltas, step_s=0.01))
    assert [delta for _, delta in taken] == deltas


def test_neither_the_first_bytes_after_a_header_nor_the_end_wait() -> None:
    async def scenario() -> float:
        loop, buffer = asyncio.get_running_loop(), ResponseBuffer(lambda: 60.0, bytearray())
        began_s = loop.time()
        buffer.put((HEADER,), ended=False)
        assert await buffer.take() == [HEADER]
        buffer.put((b"a",), ended=False)
        assert await buffer.take() == [b"a"]
        buffer.put((b"b",), ended=False)
        buffer.put((b"c",), ended=True)
        assert await buffer.take() == [b"bc"]
        assert await buffer.take() == []
        return loop.time() - began_s

    assert asyncio.run(scenario()) < 1


def test_items_before_a_failure_are_taken_first() -> None:
    async def scenario() -> None:
        buffer = ResponseBuffer(lambda: 60.0, bytearray())
        buffer.put((HEADER, b"a"), ended=False)
        buffer.fail(Unavailable("the replica was lost"))
        assert not buffer.ended
        assert await buffer.take() == [HEADER, b"a"]
        with pytest.raises(Unavailable):
            await buffer.take()

    asyncio.run(scenario())


def test_a_complete_answer_cannot_fail() -> None:
    async def scenario() -> list[StreamItem]:
        buffer = ResponseBuffer(lambda: 0.0, bytearray())
        buffer.put((b"a",), ended=True)
        buffer.fail(Unavailable("the call was cancelled"))
        assert buffer.ended
        return await buffer.take() + await buffer.take()

    assert asyncio.run(scenario()) == [b"a"]


def test_a_gateway_knows_replicas_with_unfinished_answers() -> None:
    async def scenario() -> None:
        buffers = ResponseBuffers()
        with buffers.opened("a", bytearray()) as buffer:
            assert buffers.awaited() == set()
            buffers.deliver("r0", [("a", [HEADER], b"", False), ("long gone", [b"x"], b"", True)])
            assert buffers.awaited() == {"r0"}
            assert await buffer.take() == [HEADER]
        assert buffers.awaited() == set()

    asyncio.run(scenario())


def test_streams_share_a_gateways_delta_rate() -> None:
    """N open buffers leave each four deltas a second; 40 deltas in a second become some eight."""

    async def scenario() -> tuple[int, float]:
        loop, buffers, taken = asyncio.get_running_loop(), ResponseBuffers(), 0
        others = [buffers.opened(f"{n}", bytearray()) for n in range(DELTAS_PER_S // 4)]
        for other in others:
            other.__enter__()
        began_s = loop.time()
        with buffers.opened("mine", bytearray()) as buffer:
            filling = asyncio.create_task(fill(buffer, [b"x"] * 40, 0.025))
            while await buffer.take():
                taken += 1
            await filling
        return taken, loop.time() - began_s

    taken, took_s = asyncio.run(scenario())  # a second, or more on a busy machine
    assert 4 <= taken <= 3 + 4 * took_s


def test_parts_of_items_are_taken_with_their_log_once_all_have_come() -> None:
    async def scenario() -> None:
        log = bytearray()
        buffer = ResponseBuffer(lambda: 0.0, log)
        buffer.put((HEADER, b"a"), b"1")
        buffer.put((b"first part, ",), None)
        assert await buffer.take() == [HEADER, b"a"]
        assert log == b"1"
        taking = asyncio.create_task(buffer.take())
        buffer.put((b"second part, ",), None)
        await asyncio.sleep(0.01)
        assert not taking.done()
        buffer.put((b"end",), b"2")
        assert await taking == [b"first part, second part, end"]
        assert log == b"12"
        buffer.put((b"cut off",), None)
        buffer.fail(Unavailable("the replica was lost"))
        with pytest.raises(Unavailable):
            await buffer.take()
        assert log == b"12"

    asyncio.run(scenario())
