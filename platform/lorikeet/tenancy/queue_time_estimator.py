"""How long requests wait for their first token, as one gateway sees it."""

import math

from lorikeet.errors import Overloaded
from lorikeet.retry_after import until_queue_is_short, whole_seconds

_SPAN_S = 30.0
"""First tokens count with a weight that fades to 1/e after this time."""
_ENOUGH_S = 5.0
"""Seconds at full capacity below which there is no estimate."""


class QueueTimeEstimator:
    """The requests for one base model that a gateway has let in. For one event loop.

    Those without a first token, divided by the first tokens of a second, are how long one more
    would wait (Little, Operations Research 9, 1961). Engines give tenants their turns by weight,
    so those of one tenant wait no longer than they would alone at its part of that rate: who floods
    the service lengthens nobody's wait but its own. The rate is counted while as many requests are
    under way as max_running. With fewer it tells what is asked and not what is possible, and
    nobody is refused.

    max_running: requests that the engines may run at once, this gateway's part of them.
    max_queue_s: how long one may wait. None: no bound.
    """

    def __init__(self, max_running: int | None, max_queue_s: float | None, now: float) -> None:
        self._max_running, self._max_queue_s = max_running, max_queue_s
        self._under_way = 0
        self._waiting: dict[str, int] = {}  # by tenant, who has one that waits
        self._weights: dict[str, float] = {}  # of the same
        self._first_tokens = self._full_s = 0.0
        self._now = now

    def check(self, tenant: str, weight: float, now: float) -> None:
        """Raise Overloaded where one more of this tenant would wait for too long."""
        wait_s = self._wait_s(tenant, weight, now)
        if self._max_queue_s is not None and wait_s > self._max_queue_s:
            retry_after_s = until_queue_is_short(wait_s, self._max_queue_s)
            raise Overloaded(
                f"the request could not begin within the {self._max_queue_s:g} s that it may "
                f"wait: send it again in {whole_seconds(retry_after_s)} s",
                retry_after_s=retry_after_s,
            )

    def enter(self, tenant: str, weight: float, now: float) -> None:
        """Count a request of this tenant, which begins to wait."""
        self._pass_until(now)
        self._under_way += 1
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        self._weights[tenant] = weight

    def begin(self, tenant: str, now: float) -> None:
        """End the wait of a request whose first token is there."""
        self._pass_until(now)
        self._first_tokens += self._full
        self._wait_no_more(tenant)

    def leave(self, tenant: str, now: float, *, begun: bool) -> None:
        """Count a request no more, which has ended."""
        self._pass_until(now)
        self._under_way -= 1
        if not begun:
            self._wait_no_more(tenant)

    @property
    def _full(self) -> bool:
        return self._max_running is not None and self._under_way >= self._max_running

    def _wait_s(self, tenant: str, weight: float, now: float) -> float:
        """How long one more of this tenant would wait, as far as that is known."""
        self._pass_until(now)
        if not self._full or self._full_s < _ENOUGH_S:
            return 0.0
        everybodys, own = sum(self._waiting.values()) + 1, self._waiting.get(tenant, 0) + 1
        weights = sum(self._weights.values()) - self._weights.get(tenant, 0.0) + weight
        per_s = (self._first_tokens + 1) / self._full_s
        return min(everybodys, own * weights / weight) / per_s

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
