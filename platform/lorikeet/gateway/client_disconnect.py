"""Watchers for a client's disconnect, which cancel the work that the client was waiting for."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` in the current task; if the client disconnects, cancel `work` and wait until it
    has ended.

    receive: source of the ASGI messages of a request whose body has been read.

    After a disconnect this function returns normally, with the task's cancellation taken back.
    """
    current = asyncio.current_task()
    assert current is not None
    disconnected = False

    async def cancel_on_disconnect() -> None:
        nonlocal disconnected
        with suppress(Exception):  # a connection lost in another way is a disconnect too
            await wait_for_disconnect(receive)
        disconnected = True
        current.cancel()

    watcher = asyncio.create_task(cancel_on_disconnect())
    try:
        await work
    except asyncio.CancelledError:
        if not disconnected or current.uncancel():
            raise  # the server cancels this request itself
    finally:
        watcher.cancel()


async def result_before_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises ClientDisconnect, after cancelling `work`, if the client
    disconnects first.

    receive: source of the ASGI messages of a request whose body has been read.
    """
    results = list[T]()

    async def run() -> None:
        results.append(await work)

    await run_until_disconnect(receive, run())
    if not results:
        raise ClientDisconnect
    return results[0]


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects.

    receive: source of the ASGI messages of a request whose body has been read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
