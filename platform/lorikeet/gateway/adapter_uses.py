"""Requests in flight on one gateway, by adapter."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class AdapterUses:
    """Counter of the requests in flight on this gateway, by their adapter's digest.

    Replicas keep an adapter whose version has ended until these requests are done
    (pushing/push_pipeline.py). For use in one event loop.
    """

    def __init__(self) -> None:
        self._requests = Counter[str]()

    def __contains__(self, digest: str) -> bool:
        return digest in self._requests

    @contextmanager
    def using(self, digest: str | None) -> Iterator[None]:
        """Count a request that uses an adapter, until the context ends.

        digest: SHA-256 of the adapter's blob; None: the request uses no adapter.
        """
        if digest is None:
            yield
            return
        self._requests[digest] += 1
        try:
            yield
        finally:
            self._requests[digest] -= 1
            if not self._requests[digest]:
                del self._requests[digest]
