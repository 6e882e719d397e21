"""Who gives way to a sequence whose turn has come, but for which places or KV pages are too few.

Turns (fairness.py) decide who begins, and what runs holds its place and pages to its end: with long
answers a tenant would hold all of an engine, and others would wait for one of them to end. So its
running sequences are preempted for another tenant's where that tenant

    is behind: its counter is less; and
    would even then hold less than half as much, by weight, of the places or pages.

By the second, who gave way has no claim to what was taken, so nobody is preempted in turns; and
tenants that hold about as much leave each other's streams alone.
"""

from collections import Counter
from collections.abc import Callable

from lorikeet_engine.scheduling.fairness import VirtualCounter
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus

_TIMES_AS_MUCH = 2.0


def may_begin(active: list[Sequence], max_running: int, level: float) -> bool:
    """Whether there is a place, or a tenant that has one is ahead of one that waits.

    level: the least counter of those that wait.
    """
    return len(active) < max_running or any(
        sequence.cost.counter.value > level for sequence in active
    )


def sequences_to_preempt(
    waiting: Sequence | None, active: list[Sequence], max_running: int, cache: KVCache
) -> list[Sequence]:
    """Which active sequences give way to one that waits, if any does; none if too few may."""
    if waiting is None or waiting.status is SequenceStatus.FINISHED:
        return []
    pages = cache.most_pages(waiting.length)
    lacking = cache.pages_lacking(pages, len(active))
    giving = _giving_way(waiting, active, pages, lacking, _pages_of)
    if giving is None:
        return []
    if giving or len(active) < max_running:
        return giving
    return _giving_way(waiting, active, 1, 1, lambda _: 1) or []


def furthest_ahead_last(sequence: Sequence) -> tuple[float, int]:
    """The key that sorts by tenants' counters, and each tenant's sequences by arrival."""
    return sequence.cost.counter.value, sequence.arrival


def _giving_way(
    waiting: Sequence,
    active: list[Sequence],
    wanted: int,
    lacking: int,
    holds: Callable[[Sequence], int],
) -> list[Sequence] | None:
    """The sequences that give way, until what they hold is as much as lacks; None if too few may.

    wanted: how much of it the waiting one is to have.
    """
    own, held = waiting.cost.counter, Counter[VirtualCounter]()
    for sequence in active:
        held[sequence.cost.counter] += holds(sequence)
    share = (held[own] + wanted) / own.weight
    giving = []
    for sequence in sorted(active, key=furthest_ahead_last, reverse=True):
        counter = sequence.cost.counter
        if lacking <= 0 or counter.value <= own.value:
            break
        if held[counter] / counter.weight > _TIMES_AS_MUCH * share:
            giving.append(sequence)
            held[counter] -= holds(sequence)
            lacking -= holds(sequence)
    return giving if lacking <= 0 else None


def _pages_of(sequence: Sequence) -> int:
    return sum(map(len, sequence.kv.pages))
