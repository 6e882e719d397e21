"""Turns in which lines of batches work in a gateway's event loop, beside interactive requests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_REST = 3.0
"""Pause after a line's step as a multiple of the step's processor time, while other requests
run.
"""
_SHORTEST_REST_S = 1e-3


class LineTurns:
    """Turns of coroutines in one event loop: one step of one of them in each of its iterations.

    A step is the work from one await that waits to the next. When the engine ends hundreds of lines
    at once, an interactive request waits for a few steps instead of all lines. While interactive
    requests run, the steps take at most a fourth of the event loop's time.

    others_run: returns whether interactive requests run.
    """

    def __init__(self, others_run: Callable[[], bool]) -> None:
        self._others_run = others_run
        self._waiting = deque[asyncio.Future[None]]()
        self._is_scheduled = False  # whether the event loop is to call _hand_out
        self._worked_s = 0.0  # processor time for which there was no pause yet

    @coroutine
    def run(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run a coroutine within the current task, each step in a turn; return its result.

        A cancellation needs no turn. Tasks that the coroutine creates run without turns.
        """
        pause: Generator[Any, Any, None] = self._turn()
        while True:
            error: BaseException | None = None
            try:
                yield from pause
            except BaseException as raised:  # thrown into the coroutine
                error = raised
            began_s = time.thread_time()
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._worked_s += time.thread_time() - began_s
            pause = self._after(awaited)

    def _after(self, awaited: object) -> Generator[Any, Any, None]:
        """Let the task wait for what a coroutine awaits, then for the coroutine's next turn."""
        yield awaited
        yield from self._turn()

    def _turn(self) -> Generator[Any, Any, None]:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._hand_out)
        yield from turn

    def _hand_out(self) -> None:
        """Give the next turn, and call again in the event loop's next iteration or after a rest."""
        loop = asyncio.get_running_loop()
        if not self._others_run():
            self._worked_s = 0.0
        elif (rest_s := _REST * self._worked_s) >= _SHORTEST_REST_S:
            self._worked_s = 0.0
            loop.call_later(rest_s, self._hand_out)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._hand_out)
                return
        self._is_scheduled = False
