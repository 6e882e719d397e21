"""Requests in flight on one gateway, by adapter."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lorikeet_engine.adapter import Adapter


class AdapterUses:
    """Counter of the requests in flight on this gateway, by their adapter's digest.

    Replicas keep an adapter whose pushed version's lifetime has ended until they are done
    (pushing/push_pipeline.py). For use in one event loop.
    """

    def __init__(self) -> None:
        self._requests = Counter[str]()

    def __contains__(self, digest: str) -> bool:
        return digest in self._requests

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Count a request that uses an adapter, or several added up, until the context ends.

        adapter: None: the request uses no adapter.
        """
        digests = [member.digest for member in adapter.members] if adapter else []
        self._requests.update(digests)
        try:
            yield
        finally:
            for digest in digests:
                self._requests[digest] -= 1
                if not self._requests[digest]:
                    del self._requests[digest]
