"""What one tenant or key may still do in one gateway."""

import math

from lorikeet.catalog.records import Limits
from lorikeet.errors import LimitStatus, RateLimited
from lorikeet.retry_after import until_one_ends, whole_seconds
from lorikeet.tenancy.limit_shares import LimitShare, LimitShares, Subject
from lorikeet.tenancy.token_bucket import MinuteLimit

_USUAL_S = 1.0  # how long a request takes, until some have ended
_NEWEST = 0.1  # weight of the last one to end in the average
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
        self._hold(limits, self.share(now).share, began)

    def share(self, now: float) -> LimitShare:
        """The part of the limits that this gateway enforces."""
        return self._shares.share_of(self._subject, now)

    def change(self, limits: Limits, now: float) -> None:
        """Go on under these limits and the share that this gateway has now."""
        self._hold(limits, self.share(now).share, now)

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
        self.share(now).running -= 1

    def idle(self, now: float) -> bool:
        """Whether a new one would be the same."""
        return not self.share(now).running and all(limit.full(now) for limit in self._per_minute())

    def limit_statuses(self, now: float) -> list[LimitStatus]:
        """How each limit per minute stands."""
        return [limit.status(now) for limit in self._per_minute()]

    def _hold(self, limits: Limits, share: float, now: float) -> None:
        self.limits = limits
        burst_s = limits.burst_s
        self._requests = _changed(
            self._requests, "requests", limits.requests_per_min, burst_s, share, now
        )
        self._tokens = _changed(self._tokens, "tokens", limits.tokens_per_min, burst_s, share, now)

    def _per_minute(self) -> list[MinuteLimit]:
        return [limit for limit in (self._requests, self._tokens) if limit is not None]

    def _over_minute(self, requests: int, tokens: int, now: float) -> RateLimited | None:
        even = self._shares.even()
        waits = [
            (limit.wait_s(amount, even, now), limit)
            for limit, amount in ((self._requests, requests), (self._tokens, tokens))
            if limit is not None
        ]
        wait_s, limit = max(waits, key=lambda each: each[0], default=(0.0, None))
        if limit is None or not wait_s:
            return None
        return RateLimited(
            f"{limit.per_min} {limit.kind} per minute is this {self._who}'s limit: "
            f"send it again in {whole_seconds(wait_s)} s",
            retry_after_s=wait_s,
        )

    def _over_concurrent(self, now: float) -> RateLimited | None:
        limit = self.limits.max_concurrent
        if limit is None:
            return None
        own = self.share(now)
        share = max(1, math.floor(limit * own.share + _EXACT))
        if own.running < min(share, limit - own.others_run):
            return None
        return RateLimited(
            f"{limit} requests at once is this {self._who}'s limit: wait for one to end",
            retry_after_s=until_one_ends(self._usual_s, own.running),
        )


def _changed(
    limit: MinuteLimit | None,
    kind: str,
    per_min: int | None,
    burst_s: float,
    share: float,
    now: float,
) -> MinuteLimit | None:
    """Return the limit with these values; a new one, or None, where it is new or gone."""
    if per_min is None:
        return None
    if limit is None:
        return MinuteLimit(kind, per_min, burst_s, share, now)
    limit.change(per_min, burst_s, share, now)
    return limit
