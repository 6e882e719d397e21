"""What one tenant or key may still do in one gateway."""

import math

from lorikeet.catalog.records import Limits
from lorikeet.errors import LimitStatus, RateLimited
from lorikeet.retry_after import until_one_ends, whole_seconds
from lorikeet.tenancy.limit_shares import LimitShare, LimitShares, Subject
from lorikeet.tenancy.minute_limit import MinuteLimit

_USUAL_S = 1.0  # how long a request takes, until some have ended
_NEWEST = 0.1  # what the last one to end counts in what is usual
_EXACT = 1e-9


class Allowance:
    """Requests and tokens per minute, and requests at once, of which this gateway has a share.

    For one event loop; `now` is in seconds.
    """

    def __init__(self, subject: Subject, limits: Limits, shares: LimitShares, now: float) -> None:
        self._subject, self._shares = subject, shares
        self._who = "tenant" if subject.key_id is None else "key"
        self._requests: MinuteLimit | None = None
        self._tokens: MinuteLimit | None = None
        self._usual_s = _USUAL_S
        # as if it had been here from the gateway's start
        began = now - shares.settled_s(now)
        self._hold(limits, shares.least(), began)
        self._hold(limits, self.part(now).share, began)

    def part(self, now: float) -> LimitShare:
        """The part of the limits that this gateway enforces."""
        return self._shares.part(self._subject, now)

    def change(self, limits: Limits, now: float) -> None:
        """Go on under these limits and the share that this gateway has now."""
        self._hold(limits, self.part(now).share, now)

    def refusal(self, requests: int, tokens: int, now: float) -> RateLimited | None:
        """Why so much may not begin now, if it may not."""
        return self._over_minute(requests, tokens, now) or self._over_concurrent(now)

    def take(self, requests: int, tokens: int, now: float) -> None:
        """Count this, whatever is left; what is negative is given back."""
        if self._requests is not None:
            self._requests.take(requests, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def end(self, took_s: float, now: float) -> None:
        """One of those that run has ended."""
        self._usual_s += _NEWEST * (took_s - self._usual_s)
        self.part(now).running -= 1

    def idle(self, now: float) -> bool:
        """Whether a new one would be the same."""
        return not self.part(now).running and all(meter.full(now) for meter in self._meters())

    def standings(self, now: float) -> list[LimitStatus]:
        """How each limit per minute stands."""
        return [meter.standing(now) for meter in self._meters()]

    def _hold(self, limits: Limits, share: float, now: float) -> None:
        self.limits = limits
        burst_s = limits.burst_s
        self._requests = _meter(
            self._requests, "requests", limits.requests_per_min, burst_s, share, now
        )
        self._tokens = _meter(self._tokens, "tokens", limits.tokens_per_min, burst_s, share, now)

    def _meters(self) -> list[MinuteLimit]:
        return [meter for meter in (self._requests, self._tokens) if meter is not None]

    def _over_minute(self, requests: int, tokens: int, now: float) -> RateLimited | None:
        even = self._shares.even()
        waits = [
            (meter.wait_s(amount, even, now), meter)
            for meter, amount in ((self._requests, requests), (self._tokens, tokens))
            if meter is not None
        ]
        wait_s, meter = max(waits, key=lambda each: each[0], default=(0.0, None))
        if meter is None or not wait_s:
            return None
        return RateLimited(
            f"{meter.per_min} {meter.kind} per minute is this {self._who}'s limit: "
            f"send it again in {whole_seconds(wait_s)} s",
            retry_after_s=wait_s,
        )

    def _over_concurrent(self, now: float) -> RateLimited | None:
        limit = self.limits.max_concurrent
        if limit is None:
            return None
        part = self.part(now)
        share = max(1, math.floor(limit * part.share + _EXACT))
        if part.running < min(share, limit - part.others_run):
            return None
        return RateLimited(
            f"{limit} requests at once is this {self._who}'s limit: wait for one to end",
            retry_after_s=until_one_ends(self._usual_s, part.running),
        )


def _meter(
    meter: MinuteLimit | None,
    kind: str,
    per_min: int | None,
    burst_s: float,
    share: float,
    now: float,
) -> MinuteLimit | None:
    """The same meter under this limit; a new one, or none, where the limit is new or gone."""
    if per_min is None:
        return None
    if meter is None:
        return MinuteLimit(kind, per_min, burst_s, share, now)
    meter.change(per_min, burst_s, share, now)
    return meter
