"""Request bodies, read within limits of size and time; large ones are parsed one at a time per
tenant, with pauses for other requests.
"""

import asyncio
import re
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Depends
from starlette.requests import ClientDisconnect, Request

from lorikeet.apis.body import B, parse_json
from lorikeet.errors import InvalidInput, RateLimited, RequestTimeout, RequestTooLarge
from lorikeet.retry_after import FULL_GATEWAY_S

MAX_JSON_BYTES = 8 * 2**20
BODY_S = 10.0
"""Seconds within which a request's body must arrive. For every LEAST_BYTES_PER_S bytes received,
one more second is allowed.
"""
LEAST_BYTES_PER_S = 64 * 2**10
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
# Servers refuse most malformed lengths; int() accepts "+5" and "1_0", and fails at 4,301 digits.
_LENGTH = re.compile("[0-9]{1,18}")
_LIMIT = "the limit here"


async def read_json(request: Request, schema: type[B]) -> B:
    """Read a request's body and parse it by a schema. Raises InvalidInput, or a subclass, if the
    body is too large, arrives too slowly or does not fit the schema.
    """
    return parse_json(await read_body(request), schema)


async def read_body(request: Request) -> bytes:
    """Return a request's body, expected to be JSON; {} for an empty body.

    Raises RequestTooLarge, RequestTimeout for a body that arrives too slowly, and InvalidInput for
    a compressed body.
    """
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        problem = "Content-Encoding: want an uncompressed body"
        raise InvalidInput(problem, param="content-encoding")
    body = b"".join([part async for part in timed_parts(bounded_parts(request, MAX_JSON_BYTES))])
    return body.removeprefix(BOM_UTF8) or b"{}"


def json_body(schema: type[B]) -> Any:
    """Return a FastAPI dependency that reads a request's JSON body and parses it by a schema.

    Routes that are plain functions need it: FastAPI runs them in threads, where they cannot await.
    """

    async def read(request: Request) -> B:
        return await read_json(request, schema)

    return Depends(read)


async def bounded_parts(
    request: Request, max_bytes: int, limit: str = _LIMIT
) -> AsyncIterator[bytes]:
    """Yield a body's parts as they arrive. Raises RequestTooLarge before yielding more than
    max_bytes.

    limit: name of the setting that max_bytes comes from, for the error.
    """
    declared_bytes(request, max_bytes, limit)
    received = 0
    async for part in request.stream():
        received += len(part)
        if received > max_bytes:
            raise _too_large(max_bytes, limit)
        yield part


def declared_bytes(request: Request, max_bytes: int, limit: str = _LIMIT) -> int | None:
    """Return a request's Content-Length; None if it has no such header.

    limit: name of the setting that max_bytes comes from, for the error.

    Raises InvalidInput for an invalid length, and RequestTooLarge for one above max_bytes.
    """
    declared = request.headers.get("content-length")
    if declared is None:
        return None
    if not _LENGTH.fullmatch(declared):
        problem = "Content-Length: want the body's size in bytes, such as 1024"
        raise InvalidInput(problem, param="content-length")
    if int(declared) > max_bytes:
        raise _too_large(max_bytes, limit)
    return int(declared)


async def timed_parts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a body's parts as they arrive. Raises RequestTimeout if they arrive too slowly."""
    loop = asyncio.get_running_loop()
    received, due_s = 0, loop.time() + BODY_S
    while True:
        try:
            async with asyncio.timeout_at(due_s + received / LEAST_BYTES_PER_S):
                part = await anext(parts, None)
        except TimeoutError:
            raise RequestTimeout(
                f"the body arrived too slowly, {received} bytes in time: send all of it within "
                f"{BODY_S:g} s, or at {LEAST_BYTES_PER_S // 2**10} KiB a second"
            ) from None
        if part is None:
            return
        received += len(part)
        given_s = loop.time()
        yield part
        due_s += loop.time() - given_s


async def split_parts(
    parts: AsyncIterator[bytes], count: int
) -> tuple[bytes, AsyncIterator[bytes]]:
    """Return the first `count` bytes of a body, or all of a shorter one, and its other parts."""
    head = b""
    while len(head) < count and (part := await anext(parts, None)) is not None:
        head += part

    async def rest() -> AsyncIterator[bytes]:
        if tail := head[count:]:
            yield tail
        async for part in parts:
            yield part

    return head[:count], rest()


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


def _too_large(max_bytes: int, limit: str) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes, {limit}")


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
