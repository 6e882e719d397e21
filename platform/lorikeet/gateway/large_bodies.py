"""Large request bodies: parsed in turns, so that other requests come between them."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request

from lorikeet.errors import RateLimited
from lorikeet.gateway.body import B, parse_json
from lorikeet.retry_after import FULL_GATEWAY_S

LARGE_BYTES = 32 * 2**10
"""Bodies of at least so much are parsed in turns: 8 MiB of them take 30 ms."""
MAX_WAITING_BYTES = 64 * 2**20
"""Most bytes of a tenant's large bodies that are here and not parsed, on one gateway."""
_SHORT_S, _MOST_REST_S = 1e-3, 2.0
"""A tenant's next large body waits as long as the parse of its last one took if that was so long;
where it was twice as long, twice as long as that, and so on: others wait for a long one as a whole,
so there are to be few of them."""


class LargeBodies:
    """Parses large bodies so that those of one tenant leave time for everybody else's requests.

    They are parsed one after the other, with a rest between them: a hundred that come at once would
    all be parsed before the event loop turns to anything else. For one event loop.
    """

    def __init__(self) -> None:
        self._parse_locks = WeakValueDictionary[str, _ParseLock]()  # by tenant

    async def parse_json(self, request: Request, body: bytes, schema: type[B], tenant: str) -> B:
        """Parse a tenant's body, a large one in its lock.

        Raises as the function of this name, RateLimited where too many bytes wait for a lock, and
        ClientDisconnect where the client has gone when its turn comes.
        """
        if len(body) < LARGE_BYTES:
            return parse_json(body, schema)
        loop, lock = asyncio.get_running_loop(), self._parse_locks.setdefault(tenant, _ParseLock())
        with lock.waiting(len(body)):
            await lock.acquire()
        rest_s = 0.0
        try:
            if await request.is_disconnected():
                raise ClientDisconnect
            began_s = time.thread_time()  # on a busy machine the clock would count others' work
            try:
                return parse_json(body, schema)
            finally:
                took_s = time.thread_time() - began_s
                rest_s = min(took_s * max(1.0, took_s / _SHORT_S), _MOST_REST_S)
        finally:
            loop.call_later(rest_s, lock.release)


class _ParseLock(asyncio.Lock):
    """The turn of one tenant's large bodies, with the bytes of those that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting_bytes = 0

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """Hold while a body of this size waits. Raises RateLimited where too many bytes do."""
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise RateLimited(
                f"large bodies of this tenant, {MAX_WAITING_BYTES >> 20} MiB together, wait to be "
                "parsed, as many as a gateway keeps: send fewer large bodies at once",
                retry_after_s=FULL_GATEWAY_S,
            )
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting_bytes -= size
