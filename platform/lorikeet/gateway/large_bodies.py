"""Parsing of large request bodies: one at a time per tenant, with pauses for other requests."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request

from lorikeet.apis.body import B, parse_json
from lorikeet.errors import RateLimited
from lorikeet.retry_after import FULL_GATEWAY_S

LARGE_BYTES = 32 * 2**10
"""Smallest size in bytes of a large body. Parsing 8 MiB takes 30 ms."""
MAX_WAITING_BYTES = 64 * 2**20
"""Limit on the bytes of one tenant's large bodies that wait to be parsed on one gateway."""
_SHORT_S, _MOST_REST_S = 1e-3, 2.0
"""Seconds that determine the pause between two large bodies of one tenant.

A parse of t seconds is followed by a pause of t, or of t · t / _SHORT_S if t is longer than
_SHORT_S: a long parse blocks all other requests, so long parses have to be rarer. The pause is at
most _MOST_REST_S.
"""


def rest_s(took_s: float) -> float:
    """Return the pause after a parse, in seconds.

    took_s: processor time of the parse, in seconds.
    """
    return min(took_s * max(1.0, took_s / _SHORT_S), _MOST_REST_S)


class LargeBodies:
    """Parser of request bodies that leaves time between one tenant's large bodies for other
    tenants.

    A tenant's large bodies are parsed one at a time, with pauses in which the event loop serves
    other tenants. For use in one event loop.
    """

    def __init__(self) -> None:
        self._parse_locks = WeakValueDictionary[str, _ParseLock]()  # by tenant

    async def parse_json(self, request: Request, body: bytes, schema: type[B], tenant: str) -> B:
        """Parse a tenant's JSON body by a schema. A tenant's large bodies are parsed one at a time.

        Raises InvalidInput, or a subclass, if the body has too many values or does not fit the
        schema; RateLimited if too many bytes of the tenant wait for their turn; ClientDisconnect if
        the client has disconnected when the body's turn comes.
        """
        if len(body) < LARGE_BYTES:
            return parse_json(body, schema)
        loop, lock = asyncio.get_running_loop(), self._parse_locks.setdefault(tenant, _ParseLock())
        with lock.waiting(len(body)):
            await lock.acquire()
        pause_s = 0.0
        try:
            if await request.is_disconnected():
                raise ClientDisconnect
            began_s = time.thread_time()  # on a busy machine wall time includes other processes
            try:
                return parse_json(body, schema)
            finally:
                pause_s = rest_s(time.thread_time() - began_s)
        finally:
            loop.call_later(pause_s, lock.release)


class _ParseLock(asyncio.Lock):
    """Lock under which one tenant's large bodies are parsed. Counts the bytes that wait for the
    lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting_bytes = 0

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """Count a body of `size` bytes as waiting for the lock, within the context.

        Raises RateLimited if more than MAX_WAITING_BYTES would wait.
        """
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise RateLimited(
                f"{MAX_WAITING_BYTES >> 20} MiB of this tenant's large bodies already wait to be "
                "parsed, the limit of a gateway: send fewer large bodies at once",
                retry_after_s=FULL_GATEWAY_S,
            )
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting_bytes -= size
