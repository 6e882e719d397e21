"""Where the explanations of requests that are over are kept."""

import copyreg
import io
import pickle
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from lorikeet.api.messages import FinalUsage
from lorikeet.api.request_log.record import AttemptRecord, RequestRecord
from lorikeet.routing.ranking import Candidate, Cost
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.request import Course

_TOGETHER = 32
"""Records that are packed as one: they share names, digests and replicas. That takes 0.3 ms."""
_QUICKLY = 1  # of zlib's levels; the best saves 4% more and takes half as long again
_PLACE_BYTES = 200  # a block's own objects

_Ended = tuple[float, RequestRecord]
"""When a request was over, and what is kept of it."""


class _Block(NamedTuple):
    """ids: of its requests, one after the other. ended_s: when the last was over.

    packed: by id, when each was over and its record.
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
        self._newest: dict[bytes, _Ended] = {}  # not packed yet
        self._blocks: deque[_Block] = deque()
        self._bytes = 0

    def keep(self, record: RequestRecord, now_s: float) -> None:
        """A request that is over now; its id is of 32 hex digits."""
        self._newest[bytes.fromhex(record.request_id)] = now_s, record
        if len(self._newest) >= _TOGETHER:
            self._pack(now_s)

    def find(self, request_id: str, since_s: float) -> RequestRecord | None:
        """The record of this request, if it was not over before then."""
        key = bytes.fromhex(request_id)
        found = self._newest.get(key) or self._unpacked(key)
        if found is None:
            return None
        ended_s, record = found
        return record if ended_s >= since_s else None

    def forget(self, before_s: float) -> None:
        """Drop what was over before then, as far as it takes room."""
        while self._blocks and self._blocks[0].ended_s < before_s:
            self._drop()

    def _pack(self, now_s: float) -> None:
        block = _Block(b"".join(self._newest), now_s, _packed(self._newest))
        self._newest = {}
        self._blocks.append(block)
        self._bytes += block.room_bytes
        while self._bytes > self._most_bytes:
            self._drop()

    def _drop(self) -> None:
        self._bytes -= self._blocks.popleft().room_bytes

    def _unpacked(self, key: bytes) -> _Ended | None:
        for block in reversed(self._blocks):
            if key in block.ids:
                kept: dict[bytes, _Ended] = pickle.loads(zlib.decompress(block.packed))
                if key in kept:  # else it is the end of one id and the beginning of another
                    return kept[key]
        return None


def _packed(records: dict[bytes, _Ended]) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _PLAIN
    pickler.dump(records)
    return zlib.compress(file.getbuffer(), _QUICKLY)


def _plain(kind: type[Any]) -> Callable[[Any], Any]:
    """How to pickle what has these fields: five times as fast as dataclasses do it themselves."""
    values = attrgetter(*(field.name for field in fields(kind)))
    return lambda one: (kind, values(one))


_DATACLASSES = (RequestRecord, AttemptRecord, AdapterRef, FinalUsage, Course)
_PLAIN = (
    copyreg.dispatch_table
    | {kind: _plain(kind) for kind in _DATACLASSES}
    | {kind: lambda one: (type(one), tuple(one)) for kind in (Candidate, Cost)}
)
