"""What one tenant or key may still do in one gateway."""

import math
from collections.abc import Iterable

from lorikeet.catalog.records import Limits
from lorikeet.errors import LimitStatus, RateLimited
from lorikeet.retry_after import until_one_ends, whole_seconds
from lorikeet.tenancy.limit_shares import LimitShare, LimitShares, Subject

_USUAL_S = 1.0  # how long a request takes, until some have ended
_NEWEST = 0.1  # weight of the last one to end in the average
_EXACT = 1e-9
_MINUTE_S = 60.0
_ROUNDING = 1e-6


class MinuteLimit:
    """A limit per minute as a token bucket, as large as this gateway's share of it.

    Full at first, the bucket refills at its rate up to its capacity; what passes is taken out. What
    is larger than the capacity passes when the bucket is full, and the level falls below 0: it pays
    afterwards. In any T seconds at most capacity + rate * T passes, and what the last one that
    passed was larger than the level. Every bucket holds one, however small the share.

    kind: "requests", "tokens" or "bytes". burst_s: how many seconds' worth it holds. `now` is in
    seconds and never goes back.
    """

    def __init__(self, kind: str, per_min: int, burst_s: float, share: float, now: float) -> None:
        self.kind = kind
        self._set(per_min, burst_s, share)
        self._level, self._at = self._capacity, now

    def change(self, per_min: int, burst_s: float, share: float, now: float) -> None:
        """Change the limit, its burst and this gateway's share from now on."""
        self._level, self._at = self.level(now), now
        self._set(per_min, burst_s, share)
        self._level = min(self._level, self._capacity)

    def level(self, now: float) -> float:
        """How much is in the bucket; below 0 is a debt."""
        refilled = (now - self._at) * self._rate * self._share
        return min(self._capacity, self._level + refilled)

    def count(self, amount: float, now: float) -> None:
        """Count this, whatever is left; a negative amount is given back."""
        self._level, self._at = self.level(now) - amount, now

    def wait_s(self, amount: float, even: float, now: float) -> float:
        """How long this amount must wait; 0: it passes now.

        even: the share that this gateway will soon have at least, if requests keep coming to it.
        """
        missing = max(0.0, min(amount, self._capacity) - self.level(now))
        return missing / (self._rate * max(self._share, even))

    def full_in_s(self, now: float) -> float:
        """When the bucket is full, if nothing is taken out."""
        return (self._capacity - self.level(now)) / (self._rate * self._share)

    def status(self, now: float) -> LimitStatus:
        """The status of the whole limit, were all gateways' shares used as this one's is."""
        left = math.floor(max(0.0, self.level(now))) / self._share
        remaining = min(int(left), math.ceil(self._whole))
        return LimitStatus(self.kind, self.per_min, remaining, self.full_in_s(now))

    def _set(self, per_min: int, burst_s: float, share: float) -> None:
        self.per_min, self._share = per_min, share
        self._rate = per_min / _MINUTE_S
        self._whole = self._rate * burst_s
        self._capacity = max(1.0, self._whole * share)


class Allowance:
    """Requests, tokens and bytes per minute, and requests at once, of which this has a share.

    The share is a number that LimitSync (gateway/limit_sync.py) moves between requests; a request
    reads it. For one event loop; `now` is in seconds.
    """

    def __init__(self, subject: Subject, limits: Limits, shares: LimitShares, now: float) -> None:
        self._subject, self._shares = subject, shares
        self._who = "tenant" if subject.key_id is None else "key"
        self._requests: MinuteLimit | None = None
        self._tokens: MinuteLimit | None = None
        self._bytes: MinuteLimit | None = None
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
        """Why so much may not begin now, if it may not; of what it takes none, no limit counts."""
        over_minute = self._over_minute(requests, tokens, now)
        return over_minute or (self._over_concurrent(now) if requests else None)

    def bytes_refusal(self, size: int, now: float) -> RateLimited | None:
        """Why N bytes may not be pushed now, if they may not."""
        return self._refusal_of(((self._bytes, size),), now)

    def count_bytes(self, size: int, now: float) -> None:
        """Count pushed bytes."""
        if self._bytes is not None:
            self._bytes.count(size, now)

    def count(self, requests: int, tokens: int, now: float) -> None:
        """Count this, whatever is left; what is negative is given back."""
        if self._requests is not None:
            self._requests.count(requests, now)
        if self._tokens is not None:
            self._tokens.count(tokens, now)

    def begin(self, now: float) -> None:
        """Count a request that begins."""
        self.share(now).running += 1

    def end(self, now: float, took_s: float | None) -> None:
        """Count a request that has ended. took_s: None where no replica was asked."""
        if took_s is not None:
            self._usual_s += _NEWEST * (took_s - self._usual_s)
        self.share(now).running -= 1

    def idle(self, now: float) -> bool:
        """Whether a new allowance of these limits would be the same."""
        return not self.share(now).running and all(
            limit.full_in_s(now) <= 0 for limit in self._per_minute()
        )

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
        self._bytes = _changed(self._bytes, "bytes", limits.bytes_per_min, burst_s, share, now)

    def _per_minute(self) -> list[MinuteLimit]:
        kinds = (self._requests, self._tokens, self._bytes)
        return [limit for limit in kinds if limit is not None]

    def _over_minute(self, requests: int, tokens: int, now: float) -> RateLimited | None:
        return self._refusal_of(((self._requests, requests), (self._tokens, tokens)), now)

    def _refusal_of(
        self, amounts: Iterable[tuple[MinuteLimit | None, int]], now: float
    ) -> RateLimited | None:
        even = self._shares.even()
        waits = [
            (limit.wait_s(amount, even, now), limit)
            for limit, amount in amounts
            if limit is not None and amount
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


def limit_headers(limits: Iterable[LimitStatus]) -> dict[str, str]:
    """How limits stand as OpenAI's headers, of an answer as of a refusal."""
    headers: dict[str, str] = {}
    for limit in limits:
        headers |= {
            f"x-ratelimit-limit-{limit.kind}": str(limit.limit),
            f"x-ratelimit-remaining-{limit.kind}": str(limit.remaining),
            f"x-ratelimit-reset-{limit.kind}": _duration(limit.reset_s),
        }
    return headers


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


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 120ms, 1s, 6m0s, 1h0m0s; rounded up."""
    milliseconds = math.ceil(1000 * seconds - _ROUNDING)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest_s = divmod(math.ceil(seconds - _ROUNDING), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left}m{rest_s}s"
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
