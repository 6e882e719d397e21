"""Pieces of a stream are joined as far as the gateway needs it, and never held back otherwise."""

import asyncio
from itertools import pairwise

import pytest

from lorikeet.api.messages import Header, StreamItem
from lorikeet.errors import Unavailable
from lorikeet.serving.inbox import PIECES_PER_S, Inbox, Inboxes

REST_S = 0.05
HEADER = Header("r0", None, None)


async def fill(inbox: Inbox, pieces: list[bytes], step_s: float) -> None:
    for piece in pieces:
        inbox.put((piece,), ended=False)
        await asyncio.sleep(step_s)
    inbox.put((), ended=True)


async def take_all(rest_s: float, pieces: list[bytes], step_s: float) -> list[tuple[float, bytes]]:
    """When each piece was taken, and what was in it."""
    loop, inbox, taken = asyncio.get_running_loop(), Inbox(lambda: rest_s), []
    filling = loop.create_task(fill(inbox, pieces, step_s))
    while items := await inbox.take():
        (piece,) = items
        assert isinstance(piece, bytes)
        taken.append((loop.time(), piece))
    await filling
    return taken


def test_what_comes_too_often_is_joined_and_nothing_is_lost() -> None:
    pieces = [b"%d," % number for number in range(40)]
    taken = asyncio.run(take_all(REST_S, pieces, step_s=0.005))
    times_s = [at_s for at_s, _ in taken]
    assert all(b - a >= REST_S * 0.99 for a, b in pairwise(times_s[:-1]))
    assert 3 <= len(taken) <= 12
    assert taken[0][1] == b"0,"  # the first came at once
    assert b"".join(piece for _, piece in taken) == b"".join(pieces)


@pytest.mark.parametrize("rest_s", [0.0, 0.001])
def test_what_comes_seldom_enough_is_not_held_back(rest_s: float) -> None:
    pieces = [b"%d," % number for number in range(10)]
    taken = asyncio.run(take_all(rest_s, pieces, step_s=0.01))
    assert [piece for _, piece in taken] == pieces


def test_neither_the_first_bytes_after_a_header_nor_the_end_wait() -> None:
    async def scenario() -> float:
        loop, inbox = asyncio.get_running_loop(), Inbox(lambda: 60.0)
        began_s = loop.time()
        inbox.put((HEADER,), ended=False)
        assert await inbox.take() == [HEADER]
        inbox.put((b"a",), ended=False)
        assert await inbox.take() == [b"a"]
        inbox.put((b"b",), ended=False)
        inbox.put((b"c",), ended=True)
        assert await inbox.take() == [b"bc"]
        assert await inbox.take() == []
        return loop.time() - began_s

    assert asyncio.run(scenario()) < 1


def test_what_came_before_a_failure_is_told_first() -> None:
    async def scenario() -> None:
        inbox = Inbox(lambda: 60.0)
        inbox.put((HEADER, b"a"), ended=False)
        inbox.fail(Unavailable("the replica was lost"))
        assert not inbox.complete
        assert await inbox.take() == [HEADER, b"a"]
        with pytest.raises(Unavailable):
            await inbox.take()

    asyncio.run(scenario())


def test_a_whole_answer_does_not_fail_any_more() -> None:
    async def scenario() -> list[StreamItem]:
        inbox = Inbox(lambda: 0.0)
        inbox.put((b"a",), ended=True)
        inbox.fail(Unavailable("the call was cancelled"))
        assert inbox.complete
        return await inbox.take() + await inbox.take()

    assert asyncio.run(scenario()) == [b"a"]


def test_a_gateway_knows_which_replicas_owe_it_an_answer() -> None:
    async def scenario() -> None:
        inboxes = Inboxes()
        with inboxes.opened("a") as inbox:
            assert not inboxes.awaits("r0")
            inboxes.sort("r0", [("a", [HEADER], False), ("long gone", [b"x"], True)])
            assert inboxes.awaits("r0")
            assert not inboxes.awaits("r1")
            assert await inbox.take() == [HEADER]
        assert not inboxes.awaits("r0")

    asyncio.run(scenario())


def test_streams_share_what_a_gateway_passes_on() -> None:
    """So many that each may have four pieces a second; of 40 in a second some eight come."""

    async def scenario() -> int:
        inboxes, taken = Inboxes(), 0
        others = [inboxes.opened(f"{n}") for n in range(PIECES_PER_S // 4)]
        for other in others:
            other.__enter__()
        with inboxes.opened("mine") as inbox:
            filling = asyncio.create_task(fill(inbox, [b"x"] * 40, 0.025))
            while await inbox.take():
                taken += 1
            await filling
        return taken

    assert 4 <= asyncio.run(scenario()) <= 7
