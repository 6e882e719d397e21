"""How many requests may run at once: of one tenant, and of all together."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lorikeet.errors import RateLimited

RETRY_AFTER_S = 1.0


class Admission:
    """Counts each tenant's requests in this gateway and refuses what is over its share.

    gateways: a tenant's limit is split evenly between so many gateways; each lets at least one
    request through. most: what this gateway carries, whosever it is; None: no bound. For one
    event loop; not for threads.
    """

    def __init__(self, gateways: int = 1, most: int | None = None) -> None:
        self._gateways = gateways
        self._most = most
        self._running: Counter[str] = Counter()

    @contextmanager
    def admit(self, tenant: str, max_concurrent: int | None) -> Iterator[None]:
        """Hold one of the tenant's places. max_concurrent None: no limit. Raises RateLimited."""
        self._check(tenant, max_concurrent)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    def _check(self, tenant: str, max_concurrent: int | None) -> None:
        if max_concurrent is not None:
            share = max(1, max_concurrent // self._gateways)
            if self._running[tenant] >= share:
                raise RateLimited(
                    f"{max_concurrent} requests at once is this tenant's limit: "
                    "wait for one to end",
                    limit=max_concurrent,
                    retry_after_s=RETRY_AFTER_S,
                )
        if self._most is not None and self._running.total() >= self._most:
            raise RateLimited(
                f"this gateway is full with {self._most} requests: send it again in a moment",
                limit=self._most,
                retry_after_s=RETRY_AFTER_S,
            )
