"""Pieces of a stream are joined as far as gateways need it, and never held back otherwise."""

import asyncio
from itertools import pairwise

import pytest

from lorikeet.serving.mailbox import PIECES_PER_S, Mailbox, pieces_per_s
from lorikeet.settings import Settings
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.request import Failed, FinishReason, Output, Tokens

REST_S = 0.05
LAST = Tokens("r", 0, (9,), FinishReason.STOP)


def token(number: int) -> Tokens:
    return Tokens("r", 0, (number,))


async def fill(mailbox: Mailbox, outputs: list[Output], step_s: float) -> None:
    for output in outputs:
        mailbox.put(output)
        await asyncio.sleep(step_s)


async def take_all(rest_s: float, outputs: list[Output], step_s: float) -> list[tuple[float, int]]:
    """When each piece was taken, and how many outputs were in it."""
    loop, mailbox, taken = asyncio.get_running_loop(), Mailbox(lambda: rest_s), []
    filling = loop.create_task(fill(mailbox, outputs, step_s))
    while sum(count for _, count in taken) < len(outputs):
        piece = await mailbox.take()
        taken.append((loop.time(), len(piece)))
    await filling
    return taken


def test_what_comes_too_often_is_joined_and_nothing_is_lost() -> None:
    outputs: list[Output] = [token(number) for number in range(40)]
    taken = asyncio.run(take_all(REST_S, outputs, step_s=0.005))
    times_s = [at_s for at_s, _ in taken]
    assert all(b - a >= REST_S * 0.99 for a, b in pairwise(times_s))
    assert 3 <= len(taken) <= 12
    assert taken[0][1] == 1  # the first came at once


@pytest.mark.parametrize("rest_s", [0.0, 0.001])
def test_what_comes_seldom_enough_is_not_held_back(rest_s: float) -> None:
    outputs: list[Output] = [token(number) for number in range(10)]
    taken = asyncio.run(take_all(rest_s, outputs, step_s=0.01))
    assert [count for _, count in taken] == [1] * 10


@pytest.mark.parametrize("end", [LAST, Failed("r", EngineClosed("gone"))])
def test_the_end_does_not_wait(end: Output) -> None:
    async def end_after_first() -> float:
        loop, mailbox = asyncio.get_running_loop(), Mailbox(lambda: 60.0)
        mailbox.put(token(1))
        await mailbox.take()
        mailbox.put(token(2))
        began_s = loop.time()
        mailbox.put(end)
        assert await mailbox.take() == [token(2), end]
        return loop.time() - began_s

    assert asyncio.run(end_after_first()) < 1


def test_replicas_share_what_gateways_pass_on() -> None:
    assert pieces_per_s(Settings(gateways=3, replicas=2, max_replicas=6)) == PIECES_PER_S / 2
