"""Estimator of the time that requests wait for their first token, in one gateway."""

import math

from lorikeet.errors import Overloaded
from lorikeet.retry_after import until_queue_is_short, whole_seconds

_SPAN_S = 30.0
"""Time constant, in seconds, with which older observations of the rate of first tokens decay."""
_ENOUGH_S = 5.0
"""Minimum seconds of observation at full capacity, decayed like the rate, for a queue time to be
estimated.
"""


class QueueTimeEstimator:
    """Estimator of the queue time of one base model, from the requests that a gateway has admitted.

    The estimate is the number of requests without a first token divided by the rate of first tokens
    (Little's law, Operations Research 9, 1961). Engines schedule tenants by weight, so a tenant's
    requests wait no longer than they would alone at the tenant's part of that rate. The rate is
    measured only while max_running requests are under way. With fewer, the rate shows demand
    instead of capacity, and no request is refused. Single event loop.

    max_running: this gateway's part of the requests that the engines run at once; None: no
        estimate.
    max_queue_s: longest allowed wait; None: no limit.
    now: seconds, as in every method.
    """

    def __init__(self, max_running: int | None, max_queue_s: float | None, now: float) -> None:
        self._max_running, self._max_queue_s = max_running, max_queue_s
        self._under_way = 0
        self._waiting: dict[str, int] = {}  # number by tenant, without zeros
        self._weights: dict[str, float] = {}  # of the tenants in _waiting
        self._first_tokens = self._full_s = 0.0
        self._now = now

    def check(self, tenant: str, weight: float, now: float) -> None:
        """Raise Overloaded if one more request of the tenant would wait longer than max_queue_s.

        weight: the tenant's part of a busy replica, relative to other tenants' weights.
        """
        wait_s = self._wait_s(tenant, weight, now)
        if self._max_queue_s is not None and wait_s > self._max_queue_s:
            retry_after_s = until_queue_is_short(wait_s, self._max_queue_s)
            raise Overloaded(
                f"the request would wait longer than the {self._max_queue_s:g} s that are allowed: "
                f"send it again in {whole_seconds(retry_after_s)} s",
                retry_after_s=retry_after_s,
            )

    def enter(self, tenant: str, weight: float, now: float) -> None:
        """Count a request that begins to wait for its first token.

        weight: the tenant's part of a busy replica, relative to other tenants' weights.
        """
        self._pass_until(now)
        self._under_way += 1
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        self._weights[tenant] = weight

    def begin(self, tenant: str, now: float) -> None:
        """Count a request's first token, which ends its wait."""
        self._pass_until(now)
        self._first_tokens += self._full
        self._wait_no_more(tenant)

    def leave(self, tenant: str, now: float, *, begun: bool) -> None:
        """Stop counting a request that has ended.

        begun: whether the request got a first token.
        """
        self._pass_until(now)
        self._under_way -= 1
        if not begun:
            self._wait_no_more(tenant)

    @property
    def _full(self) -> bool:
        return self._max_running is not None and self._under_way >= self._max_running

    def _wait_s(self, tenant: str, weight: float, now: float) -> float:
        """Estimate the seconds that one more request of the tenant would wait; 0 without an
        estimate.
        """
        self._pass_until(now)
        if not self._full or self._full_s < _ENOUGH_S:
            return 0.0
        of_all, own = sum(self._waiting.values()) + 1, self._waiting.get(tenant, 0) + 1
        weights = sum(self._weights.values()) - self._weights.get(tenant, 0.0) + weight
        per_s = (self._first_tokens + 1) / self._full_s
        return min(of_all, own * weights / weight) / per_s

    def _wait_no_more(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._weights[tenant]

    def _pass_until(self, now: float) -> None:
        fade = math.exp((self._now - now) / _SPAN_S)
        self._first_tokens *= fade
        self._full_s *= fade
        if self._full:
            self._full_s += _SPAN_S * (1 - fade)
        self._now = now
