"""Token buckets, and the limits per minute that a gateway holds tenants and keys to with them."""

import math
from typing import NamedTuple

from lorikeet.errors import LimitStatus

_MINUTE_S = 60.0


class BucketConfig(NamedTuple):
    """What a bucket lets through: on the average, and at once. The rate is above 0."""

    rate_per_s: float
    capacity: float


class TokenBucket:
    """Full at first, the bucket refills at its rate up to its capacity; what passes is taken out.

    What is larger than the capacity passes when the bucket is full, and the level falls below 0:
    it pays afterwards. In any T seconds at most capacity + rate * T passes, and what the last one
    that passed was larger than the level. `now` is in seconds and never goes back.
    """

    def __init__(self, config: BucketConfig, now: float) -> None:
        self._config, self._level, self._at = config, config.capacity, now

    def change(self, config: BucketConfig, now: float) -> None:
        """Let it fill as before until now, and in this way from now on."""
        self._level = min(self.level(now), config.capacity)
        self._config, self._at = config, now

    def level(self, now: float) -> float:
        """How much is in it; below 0 is a debt."""
        return min(self._config.capacity, self._level + (now - self._at) * self._config.rate_per_s)

    def missing(self, amount: float, now: float) -> float:
        """How much must still flow in before this amount passes; 0 lets it pass now."""
        return max(0.0, min(amount, self._config.capacity) - self.level(now))

    def take(self, amount: float, now: float) -> None:
        """Take this out, whatever is in it; a negative amount is given back."""
        self._level = self.level(now) - amount
        self._at = now

    def full_in_s(self, now: float) -> float:
        """When it is full, if nothing is taken out."""
        return (self._config.capacity - self.level(now)) / self._config.rate_per_s


class MinuteLimit:
    """A limit per minute: a bucket as large as this gateway's share of it, and at first full.

    kind: "requests" or "tokens". burst_s: how many seconds' worth it holds. Every bucket holds
    one, however small the share. `now` is in seconds.
    """

    def __init__(self, kind: str, per_min: int, burst_s: float, share: float, now: float) -> None:
        self.kind = kind
        self._set(per_min, burst_s, share)
        self._bucket = TokenBucket(self._config, now)

    def change(self, per_min: int, burst_s: float, share: float, now: float) -> None:
        """Change the limit, its burst and this gateway's share from now on."""
        self._set(per_min, burst_s, share)
        self._bucket.change(self._config, now)

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
        self._config = BucketConfig(self._rate * share, max(1.0, self._whole * share))
