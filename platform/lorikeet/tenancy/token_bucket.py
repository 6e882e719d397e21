"""Token bucket that enforces one limit per minute of one tenant or key in one gateway."""

import math

from lorikeet.errors import LimitStatus

_MINUTE_S = 60.0


class TokenBucket:
    """Token bucket of a limit per minute, scaled to this gateway's share of the limit.

    The bucket starts full and refills at its rate up to its capacity, which is never below 1,
    however small the share. An amount larger than the capacity is admitted when the bucket is full;
    the level then falls below 0 and later requests wait until the debt is refilled. In any T
    seconds at most capacity + rate * T is admitted, plus the debt of the last admitted amount.
    Every `now` is in seconds and never decreases.
    """

    def __init__(self, kind: str, per_min: int, burst_s: float, share: float, now: float) -> None:
        """Fill a new bucket.

        kind: unit of the limit: "requests", "tokens" or "bytes".
        per_min: the whole limit, of all gateways together.
        burst_s: capacity of the whole limit, in seconds of its rate.
        share: fraction of the limit that this gateway enforces.
        """
        self.kind = kind
        self._set(per_min, burst_s, share)
        self._level, self._at = self._capacity, now
        self._used = 0.0  # at _at; below the missing level where the share has grown since

    def change(self, per_min: int, burst_s: float, share: float, now: float) -> None:
        """Set the limit, its burst and this gateway's share from now on.

        per_min: the whole limit, of all gateways together.
        burst_s: capacity of the whole limit, in seconds of its rate.
        share: fraction of the limit that this gateway enforces.
        """
        self._pass_to(now)
        whole, old_share = self._whole, self._share
        self._set(per_min, burst_s, share)
        self._used *= min(1.0, self._whole / whole) * share / old_share  # for the same `used`
        self._level = min(self._level, self._capacity)

    def level(self, now: float) -> float:
        """Return the amount left in the bucket; a negative level is a debt."""
        return min(self._capacity, self._level + self._refilled(now))

    def count(self, amount: float, now: float) -> None:
        """Take an amount out, even if the bucket holds less; a negative amount is put back."""
        self._pass_to(now)
        self._level -= amount
        self._used = max(0.0, self._used + amount)

    def wait_s(self, amount: float, even: float, now: float) -> float:
        """Return the seconds until this amount is admitted; 0 if it is admitted now.

        even: equal share per gateway, which this gateway will soon have at least if requests keep
            arriving here.
        """
        missing = max(0.0, min(amount, self._capacity) - self.level(now))
        return missing / (self._rate * max(self._share, even))

    def full_in_s(self, now: float) -> float:
        """Return the seconds until the bucket is full if nothing is taken out."""
        return (self._capacity - self.level(now)) / (self._rate * self._share)

    def status(self, now: float) -> LimitStatus:
        """Extrapolate the status of the whole limit from the use of this gateway's share."""
        left = math.floor(max(0.0, self.level(now))) / self._share
        remaining = min(int(left), math.ceil(self._whole))
        return LimitStatus(self.kind, self.per_min, remaining, self.full_in_s(now))

    def used(self, now: float) -> int:
        """Extrapolate the part of the whole limit's burst that is used from the use of this
        gateway's share.

        A bucket whose share has grown is not full, though nothing is used.
        """
        left = max(0.0, self._used - self._refilled(now))
        return min(math.ceil(left / self._share), math.ceil(self._whole))

    def _refilled(self, now: float) -> float:
        return (now - self._at) * self._rate * self._share

    def _pass_to(self, now: float) -> None:
        self._level, self._used = self.level(now), max(0.0, self._used - self._refilled(now))
        self._at = now

    def _set(self, per_min: int, burst_s: float, share: float) -> None:
        self.per_min, self._share = per_min, share
        self._rate = per_min / _MINUTE_S
        self._whole = self._rate * burst_s
        self._capacity = max(1.0, self._whole * share)
