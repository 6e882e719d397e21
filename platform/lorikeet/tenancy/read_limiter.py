"""Limits on a tenant's requests that generate nothing, such as GET /v1/usage, in one gateway."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lorikeet.errors import RateLimited
from lorikeet.retry_after import FULL_GATEWAY_S, whole_seconds
from lorikeet.tenancy.token_bucket import TokenBucket

READS_PER_MIN = 3000
"""Limit on the reads of one tenant per minute in one gateway. A read stands for about a millisecond
of work.
"""
BURST_S = 10.0
"""Capacity of a tenant's token bucket, in seconds of its rate."""
MAX_RUNNING = 32
"""Maximum number of reading requests of one tenant at once in one gateway, waiting ones
included.
"""


class ReadLimiter:
    """Limits that every tenant has on reads (requests that generate nothing), whatever limits its
    admin set. Single event loop.

    Reads have a limit of their own, so that a client that lists models or usage takes nothing from
    its generations.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._running = Counter[str]()

    def count(self, tenant: str, reads: float = 1.0) -> None:
        """Count reads of a tenant. Raises RateLimited if the tenant has made too many.

        reads: number of reads that the request counts as. If they are more than a whole burst, it
            is admitted when the bucket is full; later requests wait until the debt is refilled.
        """
        now = self._clock()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = TokenBucket("reads", READS_PER_MIN, BURST_S, 1.0, now)
            self._buckets[tenant] = bucket
        wait_s = bucket.wait_s(reads, 1.0, now)
        if wait_s:
            raise RateLimited(
                f"{READS_PER_MIN} reads per minute is a tenant's limit for requests that generate "
                f"nothing, and this one counts {reads:.0f}: send it again in "
                f"{whole_seconds(wait_s)} s",
                retry_after_s=wait_s,
            )
        bucket.count(reads, now)

    @contextmanager
    def reading(self, tenant: str, reads: float = 1.0) -> Iterator[None]:
        """Count a request as running within the context, and its reads.

        Raises RateLimited if the tenant has made too many reads, or if MAX_RUNNING of its reading
        requests run already.

        reads: number of reads that the request counts as.
        """
        if self._running[tenant] >= MAX_RUNNING:
            raise RateLimited(
                f"{MAX_RUNNING} requests of this tenant read already, the most that a gateway "
                "allows: wait for one to end",
                retry_after_s=FULL_GATEWAY_S,
            )
        self.count(tenant, reads)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
