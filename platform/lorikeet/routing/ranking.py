"""Which replicas a request would like, best first: a pure function of what the router knows."""

from collections.abc import Sequence
from dataclasses import dataclass

from lorikeet.rendezvous import by_preference

SPILL_FACTOR = 1.25  # bounded load, Mirrokni, Thorup and Zadimoghaddam, SODA 2018
SPILL_SLACK = 8  # requests: below this a queue is too short to be worth a cold load elsewhere


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as the router sees it: its queue in requests, and whether it has the adapter."""

    replica: str
    queue: int
    resident: bool


def rank_replicas(digest: str | None, candidates: Sequence[Candidate]) -> list[list[str]]:
    """Groups of replicas, best group first; inside a group the shortest queue wins.

    A replica that has the adapter on its GPU comes first, then the adapter's home and its heir,
    then everyone: a busy replica waits for the last group, where the least loaded wins. A request
    without an adapter (digest None) has one group.
    """
    everyone = [candidate.replica for candidate in candidates]
    if digest is None or len(candidates) < 2:
        return [everyone]
    mean_queue = sum(candidate.queue for candidate in candidates) / len(candidates)
    bound = max(SPILL_SLACK, SPILL_FACTOR * mean_queue)
    free = {candidate.replica for candidate in candidates if candidate.queue <= bound}
    residents = [c.replica for c in candidates if c.resident and c.replica in free]
    home, heir = by_preference(digest, everyone)[:2]
    # The heir: where the adapter goes when its home turns out to be dead.
    groups = [residents, [home], [heir]] if home in free else [residents]
    return [group for group in (*groups, everyone) if group]
