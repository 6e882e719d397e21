"""Disk space of pushed bodies while they arrive, shared between tenants."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lorikeet.errors import Overloaded, StoreError
from lorikeet.retry_after import STORE_AWAY_S

_SHORTEST_S = 1.0
"""Seconds over which the rate of a body that has just begun is computed."""


@dataclass(eq=False)
class ArrivingBody:
    """Body of a push that is arriving, and the space that it claims.

    size_bytes: declared size of the whole body.
    received: bytes that have arrived.
    began_s: time of its beginning, in seconds of time.monotonic().
    ends: timeout around the reception, which expires if another tenant's body displaces this one.
    """

    tenant: str
    size_bytes: int
    received: int = 0
    began_s: float = field(default_factory=time.monotonic)
    ends: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    async def counted(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the body's parts, and count their bytes as received."""
        async for part in parts:
            self.received += len(part)
            yield part

    def rate(self, now_s: float) -> float:
        """Return the bytes per second at which the body has arrived."""
        return self.received / max(_SHORTEST_S, now_s - self.began_s)


class BodySpace:
    """Disk space for the bodies that one gateway is receiving. For use in one event loop.

    A body claims its declared size before it arrives. If the space does not suffice, all tenants
    with bodies have equal shares of it. A new body of a tenant within its share then displaces
    bodies of tenants that exceed their shares, the slowest body first.

    free_bytes: function that returns the free space of the bodies' file system.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._arriving: list[ArrivingBody] = []

    @asynccontextmanager
    async def claimed(self, tenant: str, size_bytes: int) -> AsyncGenerator[ArrivingBody, None]:
        """Claim the space of a body that arrives within the context.

        Raises StoreError if the disk is too full, and Overloaded if other bodies claim the space or
        if another tenant's body displaces this one.
        """
        body = ArrivingBody(tenant, size_bytes)
        for slow in self._displaced_by(body):
            self._arriving.remove(slow)
            slow.ends.reschedule(asyncio.get_running_loop().time())
        self._arriving.append(body)
        try:
            async with body.ends:
                yield body
        except TimeoutError as error:
            if not body.ends.expired():
                raise
            raise Overloaded(
                f"another tenant needs the disk's space, and this body arrived slowest, "
                f"{body.received} bytes so far: send it again, faster or with fewer at once",
                retry_after_s=STORE_AWAY_S,
            ) from error
        finally:
            if body in self._arriving:
                self._arriving.remove(body)

    def _displaced_by(self, new: ArrivingBody) -> list[ArrivingBody]:
        """Return the bodies whose reception must end to make room for a new body.

        Raises StoreError if the disk is too full, Overloaded if the new body may not displace
        enough.
        """
        arriving, now_s = list(self._arriving), time.monotonic()
        claimed = Counter({new.tenant: new.size_bytes})
        for each in arriving:
            claimed[each.tenant] += each.size_bytes
        space = self._free_bytes() + sum(each.received for each in arriving)
        if new.size_bytes > space:
            raise StoreError(
                f"the gateway's disk has no room for the {new.size_bytes} bytes of this body: free "
                "space in its LORIKEET_CACHE_DIR, then send it again"
            )
        share, displaced = space / len(claimed), list[ArrivingBody]()
        while claimed.total() > space:
            beyond = [
                each
                for each in arriving
                if each.tenant != new.tenant and claimed[each.tenant] > share
            ]
            alone = claimed[new.tenant] == new.size_bytes
            if not beyond or not (alone or claimed[new.tenant] <= share):
                raise Overloaded(
                    "bodies that are arriving claim the disk's space, "
                    f"{claimed[new.tenant]} bytes of it this tenant's with this one: send it again "
                    "when one has arrived",
                    retry_after_s=STORE_AWAY_S,
                )
            slowest = min(beyond, key=lambda each: each.rate(now_s))
            displaced.append(slowest)
            arriving.remove(slowest)
            claimed[slowest.tenant] -= slowest.size_bytes
        return displaced
