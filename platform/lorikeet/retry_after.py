"""When a client that was refused may send its request again: what every Retry-After says.

A 429 or 503 without a time of its own says 1 s. What an engine refuses comes with the wait that
its scheduler expects; a limit per minute with the time until its bucket holds what is missing.
"""

import math
from datetime import UTC, datetime, timedelta

_MIN_S = 1.0
NO_REPLICA_S = 5.0
STORE_AWAY_S = 5.0
"""A gateway asks a store that is away every second, but nobody knows for how long it is."""
FULL_GATEWAY_S = 1.0
"""A full gateway holds enough requests that one of them ends all the time."""
FULL_PROXY_S = 5
"""A proxy knows no rate; as many requests as it holds have passed it some seconds later."""


def whole_seconds(wait_s: float | None) -> int:
    """The header's value: wait_s rounded up, 1 at least, and 1 if unknown."""
    return math.ceil(max(_MIN_S, wait_s or 0.0))


def until_queue_is_short(wait_s: float, max_queue_s: float) -> float:
    """Seconds until a request that may wait max_queue_s, but would wait wait_s, can be accepted.

    By max_queue_s from now all that waits has begun, or has waited for too long itself.
    """
    return max(_MIN_S, min(wait_s - max_queue_s, max_queue_s))


def until_one_ends(usual_s: float, running: int) -> float:
    """Seconds until one of the running requests ends, where one takes usual_s."""
    return usual_s / max(1, running)


def until_next_month(now: float) -> float:
    """Seconds from now, in Unix seconds, until a new month's budget begins: the first, UTC."""
    at = datetime.fromtimestamp(now, UTC)
    first = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return (following - at).total_seconds()
