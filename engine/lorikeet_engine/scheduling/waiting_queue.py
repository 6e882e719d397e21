"""Queue of waiting sequences, and the fair order in which they are considered for a step.

WaitingQueue keeps one queue per tenant. FairOrder merges the tenants' queues: the next sequence is
always one of the tenant with the smallest virtual counter (fairness.py), and in the background only
behind all others. own_order.py decides which of the tenant's sequences it is.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice

from lorikeet_engine.scheduling.fairness import VirtualCounter, VirtualCounters
from lorikeet_engine.scheduling.own_order import OwnQueue, Turn, own_order
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Waiting sequences, in one queue per tenant.

    One thread changes the queue; any thread may count and iterate.

    counters: virtual token counters of the tenants.
    """

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._queues: dict[VirtualCounter, OwnQueue] = {}  # none of them empty

    def __len__(self) -> int:
        return sum(len(queue.by_age) for queue in list(self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, tenant by tenant."""
        return chain.from_iterable(list(queue.by_age) for queue in list(self._queues.values()))

    @property
    def has_foreground(self) -> bool:
        """Whether a sequence in the foreground waits."""
        return not all(counter.background for counter in self._queues)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to its tenant's queue; the tenant is then a waiting tenant."""
        counter = sequence.cost.counter
        self._counters.start_waiting(counter)
        queue = self._queues.get(counter) or OwnQueue()
        queue.add(sequence)
        self._queues[counter] = queue
        counter.backlog += sequence.cost.expected

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its tenant's queue.

        The sequence's status and costs must be the same as when it was added.
        """
        counter = sequence.cost.counter
        queue = self._queues[counter]
        queue.remove(sequence)
        counter.backlog -= sequence.cost.expected
        if not queue.by_age:
            del self._queues[counter]
            counter.backlog = 0.0
            self._counters.stop_waiting(counter)

    def in_fair_order(
        self,
        prefilling: Iterable[Sequence],
        is_blocked: Callable[[Sequence], bool],
        first: Sequence | None,
    ) -> "FairOrder":
        """Return turns (chances to get a chunk) of waiting and prefilling sequences in fair order:
        the tenant with the smallest counter first.

        The queue must not change during the iteration.

        prefilling: running sequences that do not decode, each tenant's in the order of arrival.
        is_blocked: returns whether to leave out a sequence, because its adapter cannot be used in
            this step.
        first: sequence that precedes all others, unless it has finished.
        """
        running = _by_tenant(prefilling)
        own_orders = [
            own_order(counter, running.get(counter, []), self._queues.get(counter), is_blocked)
            for counter in dict.fromkeys((*running, *self._queues))
        ]
        return FairOrder(own_orders, first)

    def skip_turn(self, counters: Iterable[VirtualCounter]) -> None:
        """Count tenants as not waiting, since none of their sequences could be served in this step.

        Their sequences stay in the queue. If the tenants counted as waiting, their counters would
        lag behind the others', and they would be served before all others later.

        counters: the tenants' counters.
        """
        for counter in counters:
            self._counters.stop_waiting(counter)


class FairOrder:
    """Iterator over turns (chances of a sequence to get a chunk) in fair order: the next is of the
    tenant with the smallest counter.

    Counters may change during the iteration. Takes O(tenants) time at first, then O(log tenants)
    for each sequence.

    own_orders: for each tenant, an iterator over the turns of its sequences, in order.
    first: sequence that precedes all others, unless it has finished.
    exhausted: counters of the tenants whose turns have all been taken from the iterator. Tenants
        without any turn are not among them.
    """

    def __init__(self, own_orders: Iterable[Iterator[Turn]], first: Sequence | None) -> None:
        self._own_orders = own_orders
        if first is not None and first.status is SequenceStatus.FINISHED:
            first = None
        self._first = first
        self.exhausted: list[VirtualCounter] = []

    def __iter__(self) -> Iterator[Turn]:
        if self._first is not None:
            yield Turn(self._first)
        nexts = [_next(turn, rest) for rest in self._own_orders for turn in islice(rest, 1)]
        heapify(nexts)
        while nexts:
            _, _, turn, rest = nexts[0]
            if turn.sequence is not self._first:
                yield turn
            following = next(rest, None)
            if following is None:
                heappop(nexts)
                self.exhausted.append(turn.sequence.cost.counter)
            else:
                heapreplace(nexts, _next(following, rest))


def prefilling_in_fair_order(prefilling: Iterable[Sequence]) -> FairOrder:
    """Return turns (chances to get a chunk) of prefilling sequences, the tenant with the smallest
    counter first.

    prefilling: running sequences that do not decode, each tenant's in the order of arrival.
    """
    by_tenant = _by_tenant(prefilling).items()
    return FairOrder([own_order(c, own, None, lambda _: False) for c, own in by_tenant], None)


def _by_tenant(sequences: Iterable[Sequence]) -> dict[VirtualCounter, list[Sequence]]:
    queues: dict[VirtualCounter, list[Sequence]] = {}
    for sequence in sequences:
        queues.setdefault(sequence.cost.counter, []).append(sequence)
    return queues


_Next = tuple[tuple[bool, float], int, Turn, Iterator[Turn]]


def _next(turn: Turn, rest: Iterator[Turn]) -> _Next:
    return turn.sequence.cost.counter.place, turn.sequence.arrival, turn, rest
