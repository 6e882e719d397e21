"""How many requests of one tenant may run at once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lorikeet.errors import RateLimited

RETRY_AFTER_S = 1.0


class Admission:
    """Counts each tenant's requests in this gateway and refuses what is over its share.

    gateways: a tenant's limit is split evenly between so many gateways; each lets at least one
    request through. For one event loop; not for threads.
    """

    def __init__(self, gateways: int = 1) -> None:
        self._gateways = gateways
        self._running: Counter[str] = Counter()

    def running(self, tenant: str) -> int:
        """Requests of this tenant between their admission and their end."""
        return self._running[tenant]

    @contextmanager
    def admit(self, tenant: str, max_concurrent: int | None) -> Iterator[None]:
        """Hold one of the tenant's places. max_concurrent None: no limit. Raises RateLimited."""
        if max_concurrent is not None:
            share = max(1, max_concurrent // self._gateways)
            if self._running[tenant] >= share:
                raise RateLimited(
                    f"{max_concurrent} requests at once is this tenant's limit: "
                    "wait for one to end",
                    limit=max_concurrent,
                    retry_after_s=RETRY_AFTER_S,
                )
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
