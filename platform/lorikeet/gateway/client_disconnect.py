"""Watchers for a client's disconnect, which cancel the work that the client was waiting for."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress

from starlette.types import Receive


async def run_until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` in the current task; if the client disconnects, cancel `work` and wait until it
    has ended.

    receive: source of the ASGI messages of a request whose body has been read.

    The cancellation is taken back before this function returns, as asyncio.timeout does.
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


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects.

    receive: source of the ASGI messages of a request whose body has been read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
