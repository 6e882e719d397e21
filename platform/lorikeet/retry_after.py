"""Retry-After of refused requests: all constants and formulas.

A 429 or 503 without a time of its own says 1 s. A refusal by an engine carries the wait that its
scheduler expects. A refusal by a limit per minute carries the time until its token bucket holds
enough.
"""

import math
from datetime import UTC, datetime, timedelta

_MIN_S = 1.0
NO_REPLICA_S = 5.0
STORE_AWAY_S = 5.0
"""Wait for an unreachable store, which gateways retry every second; outages last longer."""
FULL_GATEWAY_S = 1.0
"""Wait for a gateway with too many requests, so many that some end within a second."""
FULL_PROXY_S = 5
"""Wait for a proxy with too many requests, all of which have passed it after some seconds."""


def whole_seconds(wait_s: float | None) -> int:
    """Return the header's value: `wait_s` rounded up, at least 1; 1 if None."""
    return math.ceil(max(_MIN_S, wait_s or 0.0))


def until_queue_is_short(wait_s: float, max_queue_s: float) -> float:
    """Return seconds until the queue is short enough for a request that was refused, at least 1.

    The result is at most `max_queue_s`: by then, every request that waits now has started or has
    exceeded its own limit.

    wait_s: time that the request would wait now.
    max_queue_s: time that a request may wait.
    """
    return max(_MIN_S, min(wait_s - max_queue_s, max_queue_s))


def until_one_ends(usual_s: float, running: int) -> float:
    """Return expected seconds until one of `running` requests ends, if each takes `usual_s`."""
    return usual_s / max(1, running)


def until_next_month(now: float) -> float:
    """Return seconds from `now` until the budget of the next month starts, on its first day, UTC.

    now: Unix seconds.
    """
    at = datetime.fromtimestamp(now, UTC)
    first = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return (following - at).total_seconds()
