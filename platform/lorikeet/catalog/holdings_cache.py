"""Tenants' JSON that was read lately, so that a request does not read it again."""

import threading

from lorikeet.catalog.part_format import decode_holdings
from lorikeet.catalog.records import Holdings


class HoldingsCache:
    """What `decode` answered for `most_bytes` of JSON; more is forgotten, the least lately used
    first. Records take some eight times as much memory as their JSON. For any number of threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[tuple[str, bytes], Holdings] = {}  # the least lately used first
        self._held_bytes = 0
        self._changing = threading.Lock()

    def decode(self, tenant: str, data: bytes) -> Holdings:
        """What a tenant has, by its JSON."""
        key = (tenant, data)
        with self._changing:
            found = self._held.pop(key, None)
            if found is not None:
                self._held[key] = found
                return found
        found = decode_holdings(tenant, data)
        with self._changing:
            if key not in self._held:
                self._held_bytes += len(data)
            self._held[key] = found
            while self._held_bytes > self._most_bytes and len(self._held) > 1:
                oldest = next(iter(self._held))
                del self._held[oldest]
                self._held_bytes -= len(oldest[1])
        return found
