"""Which tokens the next step computes: decodes, then prefills, then who may begin, in one batch."""

import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from lorikeet_engine.admission import Adapters, Admission
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.kv_cache import KVCache
from lorikeet_engine.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one step may hold at most: tokens, sequences, distinct adapters."""

    tokens: int
    sequences: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. failed: the sequences whose adapter could not be loaded, no longer scheduled."""

    chunks: list[Chunk]
    failed: list[tuple[Sequence, AdapterError]]


class Scheduler:
    """The sequences that wait and those that run. Used by one thread.

    Only running sequences hold KV pages; one that waits for nothing but pages may hold its lease.
    """

    def __init__(self, bounds: Bounds, cache: KVCache, adapters: Adapters) -> None:
        self._bounds = bounds
        self._cache = cache
        self._adapters = adapters
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of arrival

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait behind those that already do."""
        if sequence.adapter is not None:
            self._adapters.want(sequence.adapter, sequence.request.terms.tenant)
        self.waiting.append(sequence)

    def plan(self, max_ranks: float = math.inf) -> Plan:
        """Choose the next step's chunks and give them KV pages; preempts where too few are free.

        max_ranks: an adapter may begin that keeps Σ rank of those that run within this.
        """
        active = [sequence for sequence in self.running if not sequence.complete]
        chunks = self._decodes(active)
        budget = self._bounds.tokens - len(chunks)
        for sequence in active:
            if sequence.remaining > 1 and budget > 0:
                chunks.append(Chunk.of(sequence, budget))
                budget -= chunks[-1].length
        if not self.waiting:
            return Plan(chunks, [])
        admission = Admission(
            self.running, self._bounds.adapters, max_ranks, self._cache, self._adapters
        )
        chunks += self._begin(admission, budget, len(active))
        return Plan(chunks, self._drop_failed(admission.failed))

    def launched(self, chunks: list[Chunk]) -> None:
        """The device computes them now, in this order: the next plan builds on it."""
        rows = count()
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
            if chunk.completes:
                chunk.sequence.draw(next(rows))

    def written(self, chunk: Chunk) -> None:
        """The keys and values of a launched chunk are in its pages: let others find full ones."""
        sequence, size = chunk.sequence, self._cache.page_size
        if chunk.pages is not sequence.pages:
            return  # preempted since
        first, sequence.written = sequence.written // size, chunk.end
        if first < chunk.end // size:
            for page, key in enumerate(sequence.full_keys()[first:], first):
                self._cache.publish(sequence.pages[page], key)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has made its last token: free what it holds.

        A step in flight may still write to its pages. Whoever gets them next writes in a later
        step, and the device computes one step after the other.
        """
        sequence.ended = True
        (self.running if sequence.pages else self.waiting).remove(sequence)  # it may be preempted
        self._free(sequence)

    def drop(self, doomed: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out every doomed sequence, waiting or running, and free what it holds."""
        dropped = [sequence for sequence in (*self.waiting, *self.running) if doomed(sequence)]
        if dropped:
            gone = set(dropped)
            self.waiting = deque(s for s in self.waiting if s not in gone)
            self.running = [s for s in self.running if s not in gone]
        for sequence in dropped:
            sequence.ended = True
            self._free(sequence)
        return dropped

    def _decodes(self, active: list[Sequence]) -> list[Chunk]:
        """One token of each that has no more; takes those out of `active` that it preempts."""
        chunks: list[Chunk] = []
        index = 0
        while index < len(active):
            sequence = active[index]
            if sequence.remaining > 1 or sequence.awaits_token:
                index += 1
            elif self._grow(sequence):
                chunks.append(Chunk.of(sequence, 1))
                index += 1
            else:
                self._preempt(active.pop())  # the youngest, perhaps this very sequence
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        missing = self._cache.pages_for(len(sequence.tokens)) - len(sequence.pages)
        if not missing:
            return True
        if missing > self._cache.free:
            return False
        sequence.pages.extend(self._cache.take(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        # It keeps its tokens and later computes them anew, but for pages that are still cached.
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def _begin(self, admission: Admission, budget: int, active: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in self.waiting:
            if budget == 0 or active + len(chunks) == self._bounds.sequences:
                break
            if sequence.known < len(sequence.tokens):
                break  # just preempted: the step in flight tells its last token
            if not admission.allows(sequence):
                continue
            if not self._seat(sequence, growing=active + len(chunks)):
                break
            admission.admit(sequence)
            chunks.append(Chunk.of(sequence, budget))
            budget -= chunks[-1].length
        if chunks:
            begun = {chunk.sequence for chunk in chunks}
            self.waiting = deque(s for s in self.waiting if s not in begun)
            self.running = sorted([*self.running, *begun], key=lambda s: s.arrival)
        return chunks

    def _seat(self, sequence: Sequence, growing: int) -> bool:
        """Give it pages for all its tokens, if that leaves a page for each of the `growing`."""
        shared = self._cache.find(sequence.shareable_keys())
        self._cache.share(shared)
        fresh = self._cache.pages_for(len(sequence.tokens)) - len(shared)
        if fresh + growing > self._cache.free:
            self._cache.release(shared)
            return False
        sequence.pages = array("i", shared + self._cache.take(fresh))
        sequence.computed = sequence.written = len(shared) * self._cache.page_size
        sequence.overtaken = 0
        return True

    def _drop_failed(self, errors: dict[str, AdapterError]) -> list[tuple[Sequence, AdapterError]]:
        if not errors:
            return []
        dropped = self.drop(lambda s: s.adapter is not None and s.adapter.digest in errors)
        return [(s, errors[s.adapter.digest]) for s in dropped if s.adapter is not None]

    def _free(self, sequence: Sequence) -> None:
        self._cache.release(sequence.pages)
        sequence.pages = array("i")
        sequence.computed = sequence.written = 0
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
