"""Compressed archive of ended requests' records."""

import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pydantic import TypeAdapter

from lorikeet.request_log.record import RequestRecord

_BLOCK_RECORDS = 32
"""Number of records compressed together, as they share names, digests and replicas.

Compressing them takes 0.3 ms.
"""
RECENT = 50
"""Number of each tenant's last requests that `recent` returns."""
_ID_BYTES = 16
_LEVEL = 1  # of zlib; the highest saves 4% more and takes 1.5 times as long
_OVERHEAD_BYTES = 200  # Python objects of a block

_Ended = tuple[float, RequestRecord]
"""End time of a request, seconds, and its record."""
_RECORDS = TypeAdapter(dict[str, _Ended])
"""Ended requests by id: content of a block."""


class _Block(NamedTuple):
    """Compressed records of some requests.

    ids: the requests' ids, 16 bytes each, concatenated.
    ended_s: end time of the last request to end.
    packed: compressed JSON of the records.
    """

    ids: bytes
    ended_s: float
    packed: bytes

    @property
    def held_bytes(self) -> int:
        return len(self.ids) + len(self.packed) + _OVERHEAD_BYTES


class EndedRequests:
    """Archive of ended requests' compressed records, in at most `most_bytes`. Not thread-safe.

    The oldest records are dropped first. Records are kept as few large objects: many small
    long-lived objects would fragment the heap and keep freed memory from the operating system.

    All times are seconds of the clock that gives `now_s` of `keep`.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._newest: dict[str, _Ended] = {}  # not packed yet
        self._recent: dict[str, tuple[float, bytes]] = {}  # by tenant: last end, ids in order
        self._blocks: deque[_Block] = deque()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of compressed records."""
        return self._bytes

    def keep(self, record: RequestRecord, now_s: float) -> None:
        """Add the record of a request that has just ended; its id has 32 hex digits."""
        self._newest[record.request_id] = now_s, record
        tenant = record.tenant or ""
        _, ids = self._recent.pop(tenant, (0.0, b""))  # so that the last tenant stands last
        ids = (ids + bytes.fromhex(record.request_id))[-RECENT * _ID_BYTES :]
        self._recent[tenant] = now_s, ids
        if len(self._newest) >= _BLOCK_RECORDS:
            self._pack(now_s)

    def find(self, request_id: str, since_s: float) -> RequestRecord | None:
        """Return the record of a request; None if it is unknown or ended before `since_s`."""
        found = self._newest.get(request_id) or self._find_packed(request_id)
        if found is None:
            return None
        ended_s, record = found
        return record if ended_s >= since_s else None

    def recent(self, tenant: str, since_s: float) -> Callable[[], list[RequestRecord]]:
        """Return a function that reads a tenant's last requests that ended at `since_s` or later,
        the newest first and RECENT at most.

        The function may run in any thread. It returns requests that had ended before this call.
        """
        _, packed = self._recent.get(tenant, (0.0, b""))
        ids = [packed[at : at + _ID_BYTES] for at in range(0, len(packed), _ID_BYTES)]
        newest, blocks = dict(self._newest), list(self._blocks)

        def read() -> list[RequestRecord]:
            ended, left = newest, {each for each in ids if each.hex() not in newest}
            for block in reversed(blocks):
                if not left or block.ended_s < since_s:
                    break
                if any(each in block.ids for each in left):
                    kept = _RECORDS.validate_json(zlib.decompress(block.packed))
                    ended |= kept
                    left -= {bytes.fromhex(each) for each in kept}
            found = [ended[each.hex()] for each in reversed(ids) if each.hex() in ended]
            return [record for ended_s, record in found if ended_s >= since_s]

        return read

    def forget(self, before_s: float) -> None:
        """Drop blocks whose requests all ended before `before_s`."""
        while self._blocks and self._blocks[0].ended_s < before_s:
            self._drop()
        while self._recent and self._recent[tenant := next(iter(self._recent))][0] < before_s:
            del self._recent[tenant]

    def _pack(self, now_s: float) -> None:
        packed = zlib.compress(_RECORDS.dump_json(self._newest), _LEVEL)
        block = _Block(bytes.fromhex("".join(self._newest)), now_s, packed)
        self._newest = {}
        self._blocks.append(block)
        self._bytes += block.held_bytes
        while self._bytes > self._most_bytes:
            self._drop()

    def _drop(self) -> None:
        self._bytes -= self._blocks.popleft().held_bytes

    def _find_packed(self, request_id: str) -> _Ended | None:
        key = bytes.fromhex(request_id)
        for block in reversed(self._blocks):
            if key in block.ids:
                kept = _RECORDS.validate_json(zlib.decompress(block.packed))
                if request_id in kept:  # else the match straddles two ids
                    return kept[request_id]
        return None
