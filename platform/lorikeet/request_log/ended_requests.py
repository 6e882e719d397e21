"""The archive of ended requests' records, packed."""

import zlib
from collections import deque
from typing import NamedTuple

from pydantic import TypeAdapter

from lorikeet.request_log.record import RequestRecord

_BLOCK_RECORDS = 32
"""Records that are packed as one block: they share names, digests and replicas. Takes 0.3 ms."""
_LEVEL = 1  # of zlib's levels; the best saves 4% more and takes half as long again
_OVERHEAD_BYTES = 200  # a block's own objects

_Ended = tuple[float, RequestRecord]
"""When a request ended, and its record."""
_RECORDS = TypeAdapter(dict[str, _Ended])
"""Ended requests by id, as a block holds them."""


class _Block(NamedTuple):
    """ids: of its requests, one after the other. ended_s: when the last was over.

    packed: _RECORDS of them, compressed.
    """

    ids: bytes
    ended_s: float
    packed: bytes

    @property
    def held_bytes(self) -> int:
        return len(self.ids) + len(self.packed) + _OVERHEAD_BYTES


class EndedRequests:
    """Keeps records within most_bytes, dropping the oldest. Not for several threads.

    Few objects live as long as the archive's: if each request had some, they would keep the free
    memory between them from being given back.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._newest: dict[str, _Ended] = {}  # not packed yet
        self._blocks: deque[_Block] = deque()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """What packed records take."""
        return self._bytes

    def keep(self, record: RequestRecord, now_s: float) -> None:
        """Keep the record of a request that has just ended; its id has 32 hex digits."""
        self._newest[record.request_id] = now_s, record
        if len(self._newest) >= _BLOCK_RECORDS:
            self._pack(now_s)

    def find(self, request_id: str, since_s: float) -> RequestRecord | None:
        """Return the record of a request, unless it ended before since_s."""
        found = self._newest.get(request_id) or self._find_packed(request_id)
        if found is None:
            return None
        ended_s, record = found
        return record if ended_s >= since_s else None

    def forget(self, before_s: float) -> None:
        """Drop blocks of requests that ended before then."""
        while self._blocks and self._blocks[0].ended_s < before_s:
            self._drop()

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
                if request_id in kept:  # else it is the end of one id and the beginning of another
                    return kept[request_id]
        return None
