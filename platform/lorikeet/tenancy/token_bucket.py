"""A token bucket: how much may pass on the average, and how much at once."""

from typing import NamedTuple


class BucketConfig(NamedTuple):
    """What a bucket lets through: on the average, and at once. The rate is above 0."""

    rate_per_s: float
    capacity: float


class TokenBucket:
    """At first full, it fills at its flow's rate up to its capacity; what passes is taken out.

    What is larger than the capacity passes when the bucket is full, and the level falls below 0:
    it pays afterwards. In any T seconds at most capacity + rate * T passes, and what the last one
    that passed was larger than the level. `now` is in seconds and never goes back.
    """

    def __init__(self, flow: BucketConfig, now: float) -> None:
        self._flow, self._level, self._at = flow, flow.capacity, now

    def change(self, flow: BucketConfig, now: float) -> None:
        """Let it fill as before until now, and in this way from now on."""
        self._level = min(self.level(now), flow.capacity)
        self._flow, self._at = flow, now

    def level(self, now: float) -> float:
        """How much is in it; below 0 is a debt."""
        return min(self._flow.capacity, self._level + (now - self._at) * self._flow.rate_per_s)

    def missing(self, amount: float, now: float) -> float:
        """How much must still flow in before this amount passes; 0 lets it pass now."""
        return max(0.0, min(amount, self._flow.capacity) - self.level(now))

    def take(self, amount: float, now: float) -> None:
        """Take this out, whatever is in it; a negative amount is given back."""
        self._level = self.level(now) - amount
        self._at = now

    def full_in_s(self, now: float) -> float:
        """When it is full, if nothing is taken out."""
        return (self._flow.capacity - self.level(now)) / self._flow.rate_per_s
