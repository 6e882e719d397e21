"""A limit per minute, of which this gateway enforces its share."""

import math

from lorikeet.errors import LimitStatus
from lorikeet.tenancy.token_bucket import BucketConfig, TokenBucket

_MINUTE_S = 60.0


class MinuteLimit:
    """A bucket as large as this gateway's share of the limit, and at first full.

    kind: "requests" or "tokens". burst_s: how many seconds' worth it holds. Every bucket holds
    one, however small the share. `now` is in seconds.
    """

    def __init__(self, kind: str, per_min: int, burst_s: float, share: float, now: float) -> None:
        self.kind = kind
        self._set(per_min, burst_s, share)
        self._bucket = TokenBucket(self._flow, now)

    def change(self, per_min: int, burst_s: float, share: float, now: float) -> None:
        """Change the limit, its burst and this gateway's share from now on."""
        self._set(per_min, burst_s, share)
        self._bucket.change(self._flow, now)

    def take(self, amount: float, now: float) -> None:
        """Count it, whatever is left; a negative amount is given back."""
        self._bucket.take(amount, now)

    def wait_s(self, amount: float, even: float, now: float) -> float:
        """How long this amount must wait; 0: it passes now.

        even: the share that this gateway will soon have at least, if requests keep coming to it.
        """
        missing = self._bucket.missing(amount, now)
        return missing / (self._rate * max(self._share, even))

    def full(self, now: float) -> bool:
        """Whether the bucket is full."""
        return self._bucket.full_in_s(now) <= 0

    def status(self, now: float) -> LimitStatus:
        """The status of the whole limit, were all gateways' shares used as this one's is."""
        left = math.floor(max(0.0, self._bucket.level(now))) / self._share
        remaining = min(int(left), math.ceil(self._whole))
        return LimitStatus(self.kind, self.per_min, remaining, self._bucket.full_in_s(now))

    def _set(self, per_min: int, burst_s: float, share: float) -> None:
        self.per_min, self._share = per_min, share
        self._rate = per_min / _MINUTE_S
        self._whole = self._rate * burst_s
        self._flow = BucketConfig(self._rate * share, max(1.0, self._whole * share))
