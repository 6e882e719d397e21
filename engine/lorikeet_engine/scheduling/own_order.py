"""Order of one tenant's prompts: half of the work in the order of arrival, half shortest first.

In the order of arrival alone, a short prompt would wait for the whole of a long prompt. Shortest
first alone, a long prompt would wait forever behind a stream of short prompts. So the prompt with
the least work left may overtake the oldest prompt, for as much work as the oldest prompt gets.
`overtaking` counts the work that shorter prompts may still get first:

    overtaking += cost of a chunk of the oldest prompt
    overtaking -= cost of a chunk of the shortest prompt, computed while overtaking covers the cost

If the oldest prompt is also the shortest, overtaking is raised to the cost of its last chunk, so
that the next short prompt can overtake at once.

Between prompts of one tenant and of equal priority, in work done for the tenant's prompts:

    longer prompts delay a prompt by its own work, plus the work of shorter prompts, plus one step
    a prompt ends with at most twice the work that precedes its end in the order of arrival, plus
    two steps

Each step still computes as many tokens as its budget allows. A wait for a slot or for KV pages is
not bounded here (admission.py).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from typing import NamedTuple

from lorikeet_engine.scheduling.fairness import VirtualCounter
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus


class Turn(NamedTuple):
    """Turn of a sequence: its chance to get a chunk of its prompt in the step being planned.

    After a turn in which the sequence got a chunk, call `computed`.

    overtakes: whether the sequence goes before an older sequence of its tenant.
    overtaken: whether a shorter sequence of the tenant waits for its turn.
    """

    sequence: Sequence
    overtakes: bool = False
    overtaken: bool = False

    def computed(self, cost: float) -> None:
        """Record that this turn's sequence got a chunk of its prompt in the step.

        Changes how much work shorter prompts of the tenant may still get before its oldest prompt.

        cost: cost of all tokens of the chunk, including tokens that are computed again after a
            preemption.
        """
        counter = self.sequence.cost.counter
        if self.overtakes:
            counter.overtaking -= cost
        elif self.overtaken:
            counter.overtaking += cost
        else:
            counter.overtaking = max(counter.overtaking, cost)


class OwnQueue:
    """Waiting sequences of one tenant, in two orders. Both begin with preempted sequences.

    by_age: all other sequences, by priority, then by arrival.
    by_cost: all other sequences, by priority, then by the work to compute.
    """

    def __init__(self) -> None:
        self.by_age: list[Sequence] = []
        self.by_cost: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to both orders."""
        insort(self.by_age, sequence, key=_age_key)
        insort(self.by_cost, sequence, key=_cost_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Its status and costs must not have changed since it was added."""
        del self.by_age[bisect_left(self.by_age, _age_key(sequence), key=_age_key)]
        del self.by_cost[bisect_left(self.by_cost, _cost_key(sequence), key=_cost_key)]


def own_order(
    counter: VirtualCounter,
    prefilling: list[Sequence],
    waiting: OwnQueue | None,
    is_blocked: Callable[[Sequence], bool],
) -> Iterator[Turn]:
    """Yield a turn for each of a tenant's sequences, once. Blocked sequences are left out.

    counter: the tenant's counter. While its `overtaking` (cost of the work that may go before the
        oldest sequence) covers the next chunk of the sequence with the least work, that sequence
        gets the turn, else the oldest.
    prefilling: running sequences that do not decode, in the order of arrival.
    waiting: waiting sequences; None if there are none.
    is_blocked: returns whether to leave a sequence out.
    """
    served: set[Sequence] = set()
    by_age = iter(prefilling)
    by_cost = iter(sorted(prefilling, key=_cost_key))
    if waiting is not None:
        by_age = _older_first(by_age, waiting.by_age)
        by_cost = merge(by_cost, waiting.by_cost, key=_cost_key)

    def following(kept: Sequence | None, rest: Iterable[Sequence]) -> Sequence | None:
        """Return `kept` if it may still get a turn, else the next sequence in `rest` that may.

        kept: oldest or shortest sequence before the last turn; None at first.
        """
        if kept is not None and kept not in served and not is_blocked(kept):
            return kept
        return next((s for s in rest if s not in served and not is_blocked(s)), None)

    oldest, shortest = following(None, by_age), following(None, by_cost)
    while oldest is not None:
        shorter = shortest if shortest is not oldest else None
        if shorter is not None and counter.overtaking >= shorter.cost.next_chunk:
            turn = Turn(shorter, overtakes=True)
        else:
            turn = Turn(oldest, overtaken=shorter is not None)
        yield turn
        served.add(turn.sequence)
        oldest, shortest = following(oldest, by_age), following(shortest, by_cost)


def _older_first(prefilling: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield prefilling and waiting sequences, each time the one of both that goes before the other.

    The order within each of the two groups stays.
    """
    rest = iter(waiting)
    queued = next(rest, None)
    for sequence in prefilling:
        while queued is not None and _goes_before(queued, sequence):
            yield queued
            queued = next(rest, None)
        yield sequence
    if queued is not None:
        yield queued
    yield from rest


def _goes_before(waiting: Sequence, prefilling: Sequence) -> bool:
    return waiting.arrival < prefilling.arrival and _priority(waiting) >= _priority(prefilling)


def _priority(sequence: Sequence) -> int:
    return sequence.request.scheduling.priority


def _age_key(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.status is not SequenceStatus.PREEMPTED, -_priority(sequence), sequence.arrival


def _cost_key(sequence: Sequence) -> tuple[bool, int, float, int]:
    begins_anew, priority, arrival = _age_key(sequence)
    return begins_anew, priority, sequence.cost.to_compute, arrival
