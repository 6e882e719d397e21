"""Choice of running sequences to preempt for a waiting sequence that lacks a slot or KV pages.

Fair order (fairness.py) decides which sequence begins next, but a running sequence holds its slot
and pages to its end. With long answers, one tenant could hold all slots and pages of an engine
while others wait. So sequences are preempted for a waiting sequence of another tenant if that
tenant

    is behind: its virtual counter is less than the other's; and
    would hold less than half as much, by weight, of the slots or pages, even with the sequence.

The second condition prevents thrashing: a tenant whose sequences were preempted cannot preempt to
get back what it gave up.

Sequences in the background give way to all others without the second condition.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain

from lorikeet_engine.scheduling.fairness import VirtualCounter
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus

_TIMES_AS_MUCH = 2.0


def may_begin(active: list[Sequence], max_running: int, place: tuple[bool, float]) -> bool:
    """Whether any waiting sequence has a chance to begin in the next step.

    True if a slot is free, or if a running sequence's tenant has got more service than the waiting
    tenant that is served next.

    active: running sequences that still compute tokens.
    max_running: number of slots for running sequences.
    place: the waiting tenant's place in the order of service, (background, virtual counter).
    """
    return len(active) < max_running or any(
        sequence.cost.counter.place > place for sequence in active
    )


def sequences_to_preempt(
    waiting: Sequence, active: list[Sequence], max_running: int, cache: KVCache
) -> list[Sequence]:
    """Return the running sequences to preempt for a waiting sequence.

    A sequence may be preempted if its tenant has got more service than the waiting sequence's
    tenant, and holds more than twice the slots or pages, by weight, that the latter would hold with
    this sequence. The second condition does not protect background sequences from foreground ones.
    Returns [] if too few sequences may be preempted.

    waiting: sequence that lacks a slot or KV pages.
    active: running sequences that still compute tokens.
    max_running: number of slots for running sequences.
    cache: tells how many KV pages are needed and lacking.
    """
    if waiting.status is SequenceStatus.FINISHED:
        return []
    pages = cache.most_pages(waiting.length)
    lacking = cache.pages_lacking(pages, len(active))
    dropped = Counter[int]()

    def frees(sequence: Sequence) -> int:
        return cache.freed_by(chain(*sequence.kv.pages), dropped)

    giving = _giving_way(waiting, active, pages, lacking, _pages_of, frees)
    if giving is None:
        return []
    if giving or len(active) < max_running:
        return giving
    return _giving_way(waiting, active, 1, 1, lambda _: 1, lambda _: 1) or []


def furthest_ahead_last(sequence: Sequence) -> tuple[tuple[bool, float], int]:
    """Return a running sequence's sort key.

    Sequences in the background come last, then those of the tenant that has got the most service;
    among the sequences of a tenant, the youngest comes last.
    """
    return sequence.cost.counter.place, sequence.arrival


def _giving_way(
    waiting: Sequence,
    active: list[Sequence],
    wanted: int,
    lacking: int,
    holds: Callable[[Sequence], int],
    frees: Callable[[Sequence], int],
) -> list[Sequence] | None:
    """Choose sequences to preempt until they free `lacking` slots or pages.

    A sequence may be preempted if it is in the background and the waiting one is not, or if its
    tenant has got more service than the waiting one's and holds more than _TIMES_AS_MUCH times as
    much, by their weights. Returns None if all such sequences free fewer than `lacking`.

    active: running sequences that still compute tokens.
    wanted: number of slots or pages that the waiting sequence needs in all; they count as held by
        its tenant.
    lacking: number of slots or pages to free; 0 or less: none.
    holds: returns the slots or pages that a sequence holds, shared ones included.
    frees: returns those that become free when a sequence is preempted, after those for which it
        was called before.
    """
    own, held = waiting.cost.counter, Counter[VirtualCounter]()
    for sequence in active:
        held[sequence.cost.counter] += holds(sequence)
    share = (held[own] + wanted) / own.weight
    giving = []
    for sequence in sorted(active, key=furthest_ahead_last, reverse=True):
        counter = sequence.cost.counter
        if lacking <= 0 or counter.place <= own.place:
            break
        in_background = counter.background and not own.background
        if in_background or held[counter] / counter.weight > _TIMES_AS_MUCH * share:
            giving.append(sequence)
            held[counter] -= holds(sequence)
            lacking -= frees(sequence)
    return giving if lacking <= 0 else None


def _pages_of(sequence: Sequence) -> int:
    return sum(map(len, sequence.kv.pages))
