"""Retry-After header of refused requests: all constants and formulas.

A 429 or 503 without a known time says 1 s. A refusal by an engine says the wait that the engine's
scheduler expects. A refusal by a limit per minute says the time until the limit's token bucket
holds enough.
"""

import math
from datetime import UTC, datetime, timedelta

_MIN_S = 1.0
NO_REPLICA_S = 5.0
STORE_AWAY_S = 5.0
"""Retry-After in seconds while the store is unreachable. Gateways retry the store every second, but
outages last longer.
"""
REPAIR_S = 300.0
"""Retry-After in seconds if requests fail until an admin or operator has repaired something."""
FULL_GATEWAY_S = 1.0
"""Retry-After in seconds of a gateway with too many requests: some of them end within a second."""
FULL_PROXY_S = 5
"""Retry-After in seconds of a proxy with too many requests: by then it has forwarded all of
them.
"""


def whole_seconds(wait_s: float | None) -> int:
    """Return the value of the Retry-After header: `wait_s` rounded up, at least 1; 1 if None."""
    return math.ceil(max(_MIN_S, wait_s or 0.0))


def until_queue_is_short(wait_s: float, max_queue_s: float) -> float:
    """Return the seconds, at least 1, until the queue is expected to be short enough for a refused
    request.

    wait_s: seconds that the request would wait in the queue now.
    max_queue_s: seconds that a request may wait in the queue.
    """
    return max(_MIN_S, min(wait_s - max_queue_s, max_queue_s))


def until_one_ends(usual_s: float, running: int) -> float:
    """Return the expected seconds until one of `running` requests ends.

    usual_s: usual duration of a request, seconds.
    """
    return usual_s / max(1, running)


def until_next_month(now: float) -> float:
    """Return seconds from `now` until the budget of the next month starts, on its first day, UTC.

    now: Unix seconds.
    """
    at = datetime.fromtimestamp(now, UTC)
    first = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return (following - at).total_seconds()
