"""Rate limiter of one gateway: admits requests within the limits of their tenants and keys."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lorikeet.catalog.records import KeyRecord, Limits, TenantRecord
from lorikeet.errors import LimitStatus, Overloaded, RateLimited
from lorikeet.prices import COST_UNITS
from lorikeet.retry_after import FULL_GATEWAY_S, until_one_ends, whole_seconds
from lorikeet.tenancy.limit_shares import LimitShare, LimitShares, Subject
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.queue_time_estimator import QueueTimeEstimator
from lorikeet.tenancy.token_bucket import TokenBucket
from lorikeet.usage.ledger import UsageCounts

_READING_PART = 2
"""Divisor of max_requests: one tenant may have 1/2 of that number of requests whose body has not
arrived completely.
"""
_DEFAULT_REQUEST_S = 1.0  # seconds a request is assumed to take until some have ended
_NEWEST = 0.1  # weight of the newest request in the average duration
_EPSILON = 1e-9
_ROUNDING = 1e-6


class LimitUse(NamedTuple):
    """Use of a limit.

    limit: name of the limit's field.
    most: the limit.
    used: what all gateways together have used of it, or of `burst`, by this gateway's estimate;
        None for a limit of each request alone, and if it is unknown.
    burst: amount that may be used at once, of a limit per minute; None for others.
    """

    limit: str
    most: float
    used: float | None = None
    burst: float | None = None


class SubjectLimits:
    """Limits of one tenant or key: amounts per minute, and requests at once.

    This gateway enforces its share of each limit. LimitSync (gateway/limit_sync.py) changes the
    share between requests; a request only reads it. Single event loop. Every `now` is in seconds.
    """

    def __init__(self, subject: Subject, limits: Limits, shares: LimitShares, now: float) -> None:
        self._subject, self._shares = subject, shares
        self._noun = "tenant" if subject.key_id is None else "key"
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._bytes: TokenBucket | None = None
        self._average_s = _DEFAULT_REQUEST_S
        # as if these limits had been enforced since the gateway's start
        began = now - shares.settled_s(now)
        self._set(limits, shares.least(), began)
        self._set(limits, self.share(now).share, began)

    def share(self, now: float) -> LimitShare:
        """Return the share of the limits that this gateway enforces."""
        return self._shares.share_of(self._subject, now)

    def change(self, limits: Limits, now: float) -> None:
        """Enforce other limits from now on, at this gateway's present share."""
        self._set(limits, self.share(now).share, now)

    def refusal(self, requests: int, tokens: int, now: float) -> RateLimited | None:
        """Return the error that refuses this many requests and tokens now, or None if they are
        admitted.

        An amount of 0 is never refused.
        """
        over_minute = self._refusal_of(((self._requests, requests), (self._tokens, tokens)), now)
        return over_minute or (self._over_concurrent(now) if requests else None)

    def bytes_refusal(self, size: int, now: float) -> RateLimited | None:
        """Return the error that refuses a push of `size` bytes now, or None if the push is
        admitted.
        """
        return self._refusal_of(((self._bytes, size),), now)

    def count_bytes(self, size: int, now: float) -> None:
        """Count pushed bytes."""
        if self._bytes is not None:
            self._bytes.count(size, now)

    def count(self, requests: int, tokens: int, now: float) -> None:
        """Count requests and tokens, even beyond the limits.

        Negative amounts are put back into the token buckets.
        """
        if self._requests is not None:
            self._requests.count(requests, now)
        if self._tokens is not None:
            self._tokens.count(tokens, now)

    def note_duration(self, took_s: float) -> None:
        """Include an ended request in the average duration of requests.

        took_s: seconds since the request's tokens were reserved.
        """
        self._average_s += _NEWEST * (took_s - self._average_s)

    def idle(self, now: float) -> bool:
        """Whether this object equals a new one: every bucket full, no request running."""
        return not self.share(now).running and all(
            bucket.full_in_s(now) <= 0 for bucket in self._buckets()
        )

    def limit_statuses(self, now: float) -> list[LimitStatus]:
        """Return the status of each limit per minute."""
        return [bucket.status(now) for bucket in self._buckets()]

    def uses(self, now: float) -> list[LimitUse]:
        """Return the use of each limit per minute, and of the limit on requests at once."""
        found = []
        for bucket in self._buckets():
            burst = math.ceil(bucket.per_min * self.limits.burst_s / 60)
            name = f"{bucket.kind}_per_min"
            found.append(LimitUse(name, bucket.per_min, bucket.used(now), burst))
        if (most := self.limits.max_concurrent) is not None:
            own = self.share(now)
            found.append(LimitUse("max_concurrent", most, own.running + own.others_run))
        return found

    def _set(self, limits: Limits, share: float, now: float) -> None:
        self.limits = limits
        burst_s = limits.burst_s
        self._requests = _changed(
            self._requests, "requests", limits.requests_per_min, burst_s, share, now
        )
        self._tokens = _changed(self._tokens, "tokens", limits.tokens_per_min, burst_s, share, now)
        self._bytes = _changed(self._bytes, "bytes", limits.bytes_per_min, burst_s, share, now)

    def _buckets(self) -> list[TokenBucket]:
        buckets = (self._requests, self._tokens, self._bytes)
        return [bucket for bucket in buckets if bucket is not None]

    def _refusal_of(
        self, amounts: Iterable[tuple[TokenBucket | None, int]], now: float
    ) -> RateLimited | None:
        even = self._shares.even()
        waits = [
            (bucket.wait_s(amount, even, now), bucket)
            for bucket, amount in amounts
            if bucket is not None and amount
        ]
        wait_s, bucket = max(waits, key=lambda each: each[0], default=(0.0, None))
        if bucket is None or not wait_s:
            return None
        return RateLimited(
            f"{bucket.per_min} {bucket.kind} per minute is this {self._noun}'s limit: "
            f"send it again in {whole_seconds(wait_s)} s",
            retry_after_s=wait_s,
        )

    def _over_concurrent(self, now: float) -> RateLimited | None:
        limit = self.limits.max_concurrent
        if limit is None:
            return None
        own = self.share(now)
        share = max(1, math.floor(limit * own.share + _EPSILON))
        if own.running < min(share, limit - own.others_run):
            return None
        return RateLimited(
            f"{limit} requests at once is this {self._noun}'s limit: wait for one to end",
            retry_after_s=until_one_ends(self._average_s, own.running),
        )


class RateLimiter:
    """Limits that one gateway enforces for all tenants and keys. Single event loop.

    shares: shares of the limits, and counters of running requests.
    running: number of requests that the gateway carries now.
    reading: by tenant, the number of running requests whose body has not arrived yet.
    """

    def __init__(
        self,
        shares: LimitShares,
        budget: MonthlyBudget,
        max_requests: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        *,
        max_running: Mapping[str, int] = {},
        max_queue_s: float | None = None,
    ) -> None:
        """Start without requests.

        shares: shares of the limits that this gateway enforces.
        budget: tokens and costs of each tenant's month.
        max_requests: limit on the requests of all tenants that the gateway carries at once; None:
            no limit.
        clock: monotonic seconds.
        wall: Unix seconds.
        max_running: this gateway's part of the requests that the engines run at once, by base
            model; no queue time is estimated for absent base models.
        max_queue_s: longest allowed estimate of the wait for a first token; None: no limit.
        """
        self.clock, self.wall = clock, wall
        self.budget = budget
        self.running = 0
        self.reading = Counter[str]()
        self.shares = shares
        self._max_requests = max_requests
        self._limits: dict[Subject, SubjectLimits] = {}
        self._max_running, self._max_queue_s = max_running, max_queue_s
        self._queue_times: dict[str, QueueTimeEstimator] = {}

    def check(
        self,
        tenant: TenantRecord,
        key: KeyRecord,
        *,
        takes_tokens: bool = True,
        in_batch: bool = False,
    ) -> "RateLimitHold":
        """Admit a request and return its hold, which counts it against its limits.

        Raises Overloaded if the gateway is full, InsufficientQuota if the month's budget is used
        up, RateLimited beyond a limit of the tenant or key, or if too many of the tenant's requests
        have sent no body yet.

        takes_tokens: False for a request that generates nothing: budget and token limits do not
            refuse it.
        in_batch: True for a line of a batch, which only the month's budget refuses.
        """
        hold = RateLimitHold(self, tenant, key, in_batch=in_batch)
        hold.check(takes_tokens=takes_tokens)
        return hold

    def apply_shares(self) -> None:
        """Scale every limit to this gateway's present share, and drop the limits of idle tenants
        and keys.
        """
        now = self.clock()
        for subject, limits in list(self._limits.items()):
            if limits.idle(now):
                del self._limits[subject]
            else:
                limits.change(limits.limits, now)

    def limits_of(self, tenant: TenantRecord, key: KeyRecord) -> list[SubjectLimits]:
        """Return the limits of the tenant and of the key, if they have any."""
        owners = (
            (Subject(tenant.name), tenant.limits),
            (Subject(tenant.name, key.id), key.limits),
        )
        return [self._subject_limits(*owner) for owner in owners if _any_limit(owner[1])]

    def uses(self, tenant: TenantRecord, key: KeyRecord) -> dict[str, list[LimitUse]]:
        """Return the use of the limits per minute and per month, on requests at once and on
        context, by owner: `tenant` and `key`.
        """
        now = self.clock()
        found: dict[str, list[LimitUse]] = {"tenant": [], "key": []}
        owned = (("tenant", tenant.limits, None), ("key", key.limits, key.id))
        for owner, limits, key_id in owned:
            if _any_limit(limits):
                subject = Subject(tenant.name, key_id)
                found[owner] += self._subject_limits(subject, limits).uses(now)
            if limits.max_context is not None:
                found[owner].append(LimitUse("max_context", limits.max_context))
        tokens, cost = tenant.limits.tokens_per_month, tenant.limits.cost_per_month
        if tokens is not None:
            used = self.budget.used(tenant.name).tokens
            found["tenant"].append(LimitUse("tokens_per_month", tokens, used))
        if cost is not None:
            paid = self.budget.used(tenant.name).cost / COST_UNITS
            found["tenant"].append(LimitUse("cost_per_month", cost, paid))
        return found

    def queue_time(self, base_model: str) -> QueueTimeEstimator:
        """Return the estimator of the queue time for this base model."""
        estimator = self._queue_times.get(base_model)
        if estimator is None:
            max_running = self._max_running.get(base_model)
            estimator = QueueTimeEstimator(max_running, self._max_queue_s, self.clock())
            self._queue_times[base_model] = estimator
        return estimator

    def check_capacity(self) -> None:
        """Raise Overloaded if this gateway already carries max_requests requests."""
        if self._max_requests is not None and self.running >= self._max_requests:
            raise Overloaded(
                f"this gateway is full with {self._max_requests} requests: "
                "send it again in a moment",
                retry_after_s=FULL_GATEWAY_S,
            )

    def check_reading(self, tenant: str) -> None:
        """Raise RateLimited if too many of the tenant's requests wait for their body to arrive."""
        if self._max_requests is None:
            return
        most = max(1, self._max_requests // _READING_PART)
        if self.reading[tenant] >= most:
            raise RateLimited(
                f"{most} requests of this tenant have sent no body yet, the most that a gateway "
                "allows: send bodies without delay",
                retry_after_s=FULL_GATEWAY_S,
            )

    def _subject_limits(self, subject: Subject, limits: Limits) -> SubjectLimits:
        now = self.clock()
        held = self._limits.get(subject)
        if held is None:
            held = self._limits[subject] = SubjectLimits(subject, limits, self.shares, now)
        elif held.limits != limits:
            held.change(limits, now)
        return held


class RateLimitHold:
    """One request's hold on its limits. Methods are called in this order:

        check         before the body is read: checks the gateway's capacity, the month's budget,
                      requests per minute and requests at once
        body_is_here  when the body has arrived, or never will
        reserve       before a replica is asked: reserves tokens, checks the estimated queue time
        first_token   ends the wait
        settle        replaces the reserved tokens by the tokens used
        release       ends the request; required after every `check` that did not raise

    Tokens are reserved by an estimate. If the real number never becomes known, the reserved number
    counts.

    The request counts against the SubjectLimits of its tenant and of its key, if they have limits.
    The base model's QueueTimeEstimator refuses nobody while its engines have capacity. The
    MonthlyBudget is checked if the tenant has one.

    in_batch: the request is a line of a batch: it counts against the budget alone.
    """

    def __init__(
        self, limiter: RateLimiter, tenant: TenantRecord, key: KeyRecord, *, in_batch: bool = False
    ) -> None:
        self._limiter = limiter
        self._tenant, self._in_batch = tenant, in_batch
        both = (Subject(tenant.name), Subject(tenant.name, key.id))
        self._subjects = () if in_batch else both
        self._limits = [] if in_batch else limiter.limits_of(tenant, key)
        self._tokens = self._cost = 0
        self._begun_s: float | None = None
        self._queue_time: QueueTimeEstimator | None = None
        self._waits = True
        self._reading = False

    def check(self, *, takes_tokens: bool) -> None:
        """Admit and count the request, before its body arrives.

        Raises Overloaded if the gateway is full, InsufficientQuota if the month's budget is used
        up, RateLimited beyond a limit of the tenant or key, or if too many of the tenant's requests
        have sent no body yet.

        takes_tokens: False for a request that generates nothing: budget and token limits do not
            refuse it.
        """
        now = self._limiter.clock()
        if not self._in_batch:
            self._limiter.check_capacity()
        for limits in self._limits:
            limits.share(now).count_request(now)
        if takes_tokens:
            budget, wall_s = self._limiter.budget, self._limiter.wall()
            budget.check(self._tenant.name, self._tenant.limits, wall_s)
        if self._in_batch:
            return
        self._refuse_over_limits(1, int(takes_tokens))
        self._limiter.check_reading(self._tenant.name)
        for limits in self._limits:
            limits.count(1, 0, now)
        for subject in self._subjects:
            self._limiter.shares.begin(subject)
        self._limiter.running += 1
        self._limiter.reading[self._tenant.name] += 1
        self._reading = True

    def body_is_here(self) -> None:
        """Record that the request's body has arrived, or never will. Idempotent."""
        if not self._reading:
            return
        self._reading = False
        reading, tenant = self._limiter.reading, self._tenant.name
        reading[tenant] -= 1
        if not reading[tenant]:
            del reading[tenant]

    def take_bytes(self, size: int) -> None:
        """Count the body of a push before it arrives. Raises RateLimited beyond a limit on pushed
        bytes.

        size: bytes of the pushed adapter.
        """
        now = self._limiter.clock()
        self._refuse([limits.bytes_refusal(size, now) for limits in self._limits])
        for limits in self._limits:
            limits.count_bytes(size, now)

    def reserve(self, tokens: int, base_model: str, *, background: bool = False) -> None:
        """Reserve tokens, and begin to wait for the first token.

        background: the request runs in the background, so its wait says nothing about the wait of
            others and is not estimated.

        Raises RateLimited beyond a token limit, Overloaded if the estimated queue time is too long.
        """
        self._refuse_over_limits(0, tokens)
        now = self._limiter.clock()
        if not background:
            queue_time = self._limiter.queue_time(base_model)
            queue_time.check(self._tenant.name, self._tenant.weight, now)
            queue_time.enter(self._tenant.name, self._tenant.weight, now)
            self._queue_time = queue_time
        self._begun_s = now
        for limits in self._limits:
            limits.count(0, tokens, now)
        self._tokens = tokens

    def first_token(self) -> None:
        """End the wait for the first token. Idempotent."""
        if self._waits:
            self._waits = False
            if self._queue_time is not None:
                self._queue_time.begin(self._tenant.name, self._limiter.clock())

    def settle(self, tokens: int, cost: int = 0) -> None:
        """Replace the reserved tokens by the number of tokens that the request has used.

        cost: their price, in units of cost (prices.py).
        """
        for limits in self._limits:
            limits.count(0, tokens - self._tokens, self._limiter.clock())
        self._tokens, self._cost = tokens, cost

    def release(self) -> None:
        """End the request, and count its tokens and cost against the month's budgets."""
        now = self._limiter.clock()
        self._limiter.running -= not self._in_batch
        self.body_is_here()
        for subject in self._subjects:
            self._limiter.shares.end(subject)
        if self._begun_s is not None:
            if self._queue_time is not None:
                self._queue_time.leave(self._tenant.name, now, begun=not self._waits)
            for limits in self._limits:
                limits.note_duration(now - self._begun_s)
        budgets = (self._tenant.limits.tokens_per_month, self._tenant.limits.cost_per_month)
        if budgets != (None, None):
            used = UsageCounts(output_tokens=self._tokens, cost=self._cost)
            self._limiter.budget.settle(self._tenant.name, used, now)

    def limit_statuses(self) -> list[LimitStatus]:
        """Return the status of each kind of limit per minute: the tenant's or the key's, whichever
        has less left.
        """
        now = self._limiter.clock()
        tightest: dict[str, LimitStatus] = {}
        for status in (each for limits in self._limits for each in limits.limit_statuses(now)):
            other = tightest.get(status.kind, status)
            tightest[status.kind] = min(status, other, key=lambda each: each.remaining)
        return list(tightest.values())

    def _refuse_over_limits(self, requests: int, tokens: int) -> None:
        now = self._limiter.clock()
        self._refuse([limits.refusal(requests, tokens, now) for limits in self._limits])

    def _refuse(self, found: Sequence[RateLimited | None]) -> None:
        """Raise the refusal with the longest Retry-After; return if there is none.

        found: one refusal for each checked limit; None if that limit admits the request.
        """
        refusals = [refusal for refusal in found if refusal is not None]
        if refusals:
            longest = max(refusals, key=lambda refusal: refusal.retry_after_s or 0.0)
            longest.limits = self.limit_statuses()
            raise longest


def limit_headers(limits: Iterable[LimitStatus]) -> dict[str, str]:
    """Format statuses as OpenAI's x-ratelimit headers, for answers and refusals."""
    headers: dict[str, str] = {}
    for limit in limits:
        headers |= {
            f"x-ratelimit-limit-{limit.kind}": str(limit.limit),
            f"x-ratelimit-remaining-{limit.kind}": str(limit.remaining),
            f"x-ratelimit-reset-{limit.kind}": _duration(limit.reset_s),
        }
    return headers


def _any_limit(limits: Limits) -> bool:
    """Whether any of these limits is one that SubjectLimits enforces."""
    per_min = (limits.requests_per_min, limits.tokens_per_min, limits.bytes_per_min)
    return any(limit is not None for limit in (*per_min, limits.max_concurrent))


def _changed(
    bucket: TokenBucket | None,
    kind: str,
    per_min: int | None,
    burst_s: float,
    share: float,
    now: float,
) -> TokenBucket | None:
    """Return `bucket` changed to these values, or a new TokenBucket with them if `bucket` is None.

    Returns None if `per_min` is None: no limit.

    kind: unit of the limit, used for a new bucket: "requests", "tokens" or "bytes".
    per_min: the whole limit, of all gateways together.
    burst_s: capacity of the whole limit, in seconds of its rate.
    share: fraction of the limit that this gateway enforces.
    """
    if per_min is None:
        return None
    if bucket is None:
        return TokenBucket(kind, per_min, burst_s, share, now)
    bucket.change(per_min, burst_s, share, now)
    return bucket


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does, rounded up: 120ms, 1s, 6m0s, 1h0m0s."""
    milliseconds = math.ceil(1000 * seconds - _ROUNDING)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest_s = divmod(math.ceil(seconds - _ROUNDING), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left}m{rest_s}s"
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
