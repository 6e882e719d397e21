"""Where the explanations of requests that are over are kept."""

import marshal
import zlib
from collections import deque
from typing import Any, NamedTuple

Kept = tuple[Any, ...]
"""Plain values alone, which marshal packs."""

_TOGETHER = 32
"""So many are packed as one: they share names, digests and replicas. It takes 0.3 ms."""
_QUICKLY = 1  # of zlib's levels; the best saves 4% more and takes half as long again
_PLACE_BYTES = 200  # a block's own objects


class _Block(NamedTuple):
    """ids: of its requests, one after the other. ended_s: when the last was over.

    packed: by id, when each was over and what is kept of it.
    """

    ids: bytes
    ended_s: float
    packed: bytes

    @property
    def room_bytes(self) -> int:
        return len(self.ids) + len(self.packed) + _PLACE_BYTES


class Archive:
    """Keeps what it is given within most_bytes, dropping the oldest. Not for several threads.

    Few objects live as long as what is kept: were there some for each request, they would hold on
    to the memory between them that is free.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._newest: dict[bytes, tuple[float, Kept]] = {}  # not packed yet
        self._blocks: deque[_Block] = deque()
        self._bytes = 0

    def keep(self, request_id: str, kept: Kept, now_s: float) -> None:
        """Of a request that is over now. request_id: 32 hex digits."""
        self._newest[bytes.fromhex(request_id)] = now_s, kept
        if len(self._newest) >= _TOGETHER:
            self._pack(now_s)

    def find(self, request_id: str, since_s: float) -> Kept | None:
        """What is kept of this request, if it was not over before then."""
        key = bytes.fromhex(request_id)
        found = self._newest.get(key) or self._packed(key)
        if found is None:
            return None
        ended_s, kept = found
        return kept if ended_s >= since_s else None

    def forget(self, before_s: float) -> None:
        """Drop what was over before then, as far as it takes room."""
        while self._blocks and self._blocks[0].ended_s < before_s:
            self._drop()

    def _pack(self, now_s: float) -> None:
        packed = zlib.compress(marshal.dumps(self._newest), _QUICKLY)
        block = _Block(b"".join(self._newest), now_s, packed)
        self._newest = {}
        self._blocks.append(block)
        self._bytes += block.room_bytes
        while self._bytes > self._most_bytes:
            self._drop()

    def _drop(self) -> None:
        self._bytes -= self._blocks.popleft().room_bytes

    def _packed(self, key: bytes) -> tuple[float, Kept] | None:
        for block in reversed(self._blocks):
            if key in block.ids:
                kept: dict[bytes, tuple[float, Kept]] = marshal.loads(zlib.decompress(block.packed))
                if key in kept:  # else it is the end of one id and the beginning of another
                    return kept[key]
        return None
