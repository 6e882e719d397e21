"""Queue of waiting sequences, and the fair order in which they are considered for a step.

WaitingQueue keeps one queue per tenant. FairOrder merges the queues: the next sequence is always of
the tenant with the smallest virtual counter (fairness.py).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import chain

from lorikeet_engine.scheduling.fairness import VirtualCounter, VirtualCounters
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Waiting sequences, in one queue per tenant.

    A tenant's preempted sequences come first; then its other sequences, by priority and then by
    arrival. One thread changes the queue; any thread may count and iterate.

    counters: virtual token counters of the tenants.
    """

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._queues: dict[VirtualCounter, list[Sequence]] = {}  # none of them empty

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, tenant by tenant."""
        return chain.from_iterable(map(list, list(self._queues.values())))

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to its tenant's queue, and the tenant to the waiting ones."""
        counter = sequence.cost.counter
        self._counters.start_waiting(counter)
        insort(self._queues.setdefault(counter, []), sequence, key=_queue_key)
        counter.backlog += sequence.cost.expected

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its tenant's queue.

        The sequence must still have the status with which it was added.
        """
        counter = sequence.cost.counter
        queue = self._queues[counter]
        del queue[bisect_left(queue, _queue_key(sequence), key=_queue_key)]
        counter.backlog -= sequence.cost.expected
        if not queue:
            del self._queues[counter]
            counter.backlog = 0.0
            self._counters.stop_waiting(counter)

    def in_fair_order(
        self,
        prefilling: Iterable[Sequence],
        is_blocked: Callable[[Sequence], bool],
        first: Sequence | None,
    ) -> "FairOrder":
        """Return waiting and prefilling sequences in fair order.

        The queue must not change during the iteration.

        prefilling: running sequences that do not decode; they precede their tenants' waiting
            sequences.
        is_blocked: returns whether to skip a sequence, because its adapter cannot be used in this
            step.
        first: sequence that precedes all others, unless it has finished.
        """
        queues: dict[VirtualCounter, list[Sequence]] = {}
        for sequence in prefilling:
            queues.setdefault(sequence.cost.counter, []).append(sequence)
        for counter, queue in self._queues.items():
            queues[counter] = [*queues[counter], *queue] if counter in queues else queue
        return FairOrder(queues, is_blocked, first)

    def skip_turn(self, counters: Iterable[VirtualCounter]) -> None:
        """Remove tenants that had no sequence to serve from the waiting ones, so that they gain no
        credit.

        counters: the tenants' counters.
        """
        for counter in counters:
            self._counters.stop_waiting(counter)


class FairOrder:
    """Iterator over sequences in fair order: the next is of the tenant with the smallest counter.

    Counters may change during the iteration. Takes O(tenants) time at first, then O(log tenants)
    for
    each sequence.

    queues: each tenant's sequences, in order; none is empty.
    is_blocked: returns whether to skip a sequence.
    first: sequence that precedes all others, unless it has finished.
    exhausted: tenants of which all sequences have been returned or skipped.
    """

    def __init__(
        self,
        queues: Mapping[VirtualCounter, list[Sequence]],
        is_blocked: Callable[[Sequence], bool],
        first: Sequence | None,
    ) -> None:
        self._queues, self._is_blocked = queues, is_blocked
        if first is not None and first.status is SequenceStatus.FINISHED:
            first = None
        self._first = first
        self.exhausted: list[VirtualCounter] = []

    def __iter__(self) -> Iterator[Sequence]:
        if self._first is not None:
            yield self._first
        rests = [(counter, iter(queue)) for counter, queue in self._queues.items()]
        turns = [_turn(counter, next(rest), rest) for counter, rest in rests]
        heapify(turns)
        while turns:
            _, _, sequence, rest = turns[0]
            counter = sequence.cost.counter
            if sequence is not self._first:
                yield sequence
            following = next((s for s in rest if not self._is_blocked(s)), None)
            if following is None:
                heappop(turns)
                self.exhausted.append(counter)
            else:
                heapreplace(turns, _turn(counter, following, rest))


_Turn = tuple[float, int, Sequence, Iterator[Sequence]]


def _turn(counter: VirtualCounter, sequence: Sequence, rest: Iterator[Sequence]) -> _Turn:
    return counter.value, sequence.arrival, sequence, rest


def _queue_key(sequence: Sequence) -> tuple[bool, int, int]:
    priority = sequence.request.scheduling.priority
    return sequence.status is not SequenceStatus.PREEMPTED, -priority, sequence.arrival
