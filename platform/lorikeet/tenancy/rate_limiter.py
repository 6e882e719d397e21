"""Lets requests in, as far as the limits of their tenants and keys allow it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lorikeet.catalog.records import KeyRecord, Limits, TenantRecord
from lorikeet.errors import LimitStatus, Overloaded, RateLimited
from lorikeet.retry_after import FULL_GATEWAY_S
from lorikeet.tenancy.allowance import Allowance
from lorikeet.tenancy.limit_shares import LimitShares, Subject
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.queue_time import QueueTimeEstimator

_READING_PART = 2
"""While their bodies come, one tenant's requests may be half of what a gateway carries."""


class RateLimiter:
    """The limits of one gateway. For one event loop.

    max_requests: most requests that the gateway carries at once, of all tenants; None: no bound.
    running: those it carries; reading: by tenant, those of them whose bodies have not come yet.
    clock: seconds, wall: Unix seconds. max_running, by base model, and max_queue_s: as a
    QueueTimeEstimator takes them.
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
        self.clock, self.wall = clock, wall
        self.budget = budget
        self.running = 0
        self.reading = Counter[str]()
        self._shares = shares
        self._max_requests = max_requests
        self._allowances: dict[Subject, Allowance] = {}
        self._max_running, self._max_queue_s = max_running, max_queue_s
        self._queue_times: dict[str, QueueTimeEstimator] = {}

    def check(
        self, tenant: TenantRecord, key: KeyRecord, *, takes_tokens: bool = True
    ) -> "RateLimitHold":
        """Begin a request's walk through its limits.

        takes_tokens: False for one that generates nothing, which no limit on tokens refuses. Raises
        Overloaded, InsufficientQuota, RateLimited.
        """
        hold = RateLimitHold(self, tenant, key)
        hold.check(takes_tokens=takes_tokens)
        return hold

    def apply_shares(self) -> None:
        """Apply this gateway's shares as they are now."""
        now = self.clock()
        for subject, allowance in list(self._allowances.items()):
            if allowance.idle(now):
                del self._allowances[subject]
            else:
                allowance.change(allowance.limits, now)

    def allowances(self, tenant: TenantRecord, key: KeyRecord) -> list[Allowance]:
        """What the tenant and the key may do, where they have limits."""
        owners = (
            (Subject(tenant.name), tenant.limits),
            (Subject(tenant.name, key.id), key.limits),
        )
        return [self._allowance(*owner) for owner in owners if _any_limit(owner[1])]

    def queue_time(self, base_model: str) -> QueueTimeEstimator:
        """How long requests for this base model wait."""
        estimator = self._queue_times.get(base_model)
        if estimator is None:
            max_running = self._max_running.get(base_model)
            estimator = QueueTimeEstimator(max_running, self._max_queue_s, self.clock())
            self._queue_times[base_model] = estimator
        return estimator

    def check_room(self) -> None:
        """Raises Overloaded when this gateway carries as much as it can."""
        if self._max_requests is not None and self.running >= self._max_requests:
            raise Overloaded(
                f"this gateway is full with {self._max_requests} requests: "
                "send it again in a moment",
                retry_after_s=FULL_GATEWAY_S,
            )

    def check_reading(self, tenant: str) -> None:
        """Raises RateLimited where a tenant has too many requests without bodies already."""
        if self._max_requests is None:
            return
        most = max(1, self._max_requests // _READING_PART)
        if self.reading[tenant] >= most:
            raise RateLimited(
                f"the bodies of {most} requests of this tenant have not come yet, as many as a "
                "gateway waits for: send bodies without delay",
                retry_after_s=FULL_GATEWAY_S,
            )

    def _allowance(self, subject: Subject, limits: Limits) -> Allowance:
        now = self.clock()
        allowance = self._allowances.get(subject)
        if allowance is None:
            allowance = self._allowances[subject] = Allowance(subject, limits, self._shares, now)
        elif allowance.limits != limits:
            allowance.change(limits, now)
        return allowance


class RateLimitHold:
    """One request's walk through its limits; its methods come in this order.

        check        before its body is read: the gateway's room, the month's budget, requests per
                     minute and at once
        body_is_here
        reserve      before a replica is asked: its tokens, and how long it would wait
        first_token  it waits no more
        settle       what it took is known
        release      it is over: whoever passed `check` must release

    Tokens are reserved by an estimate and settled when it is known what they were; where that never
    gets known, what was reserved counts.

    Limits are counted by an Allowance of the tenant and one of the key, where these have limits.
    The wait is estimated by the base model's QueueTimeEstimator, which refuses nobody as long as
    its engines are not full. A MonthlyBudget is asked where the tenant has one.
    """

    def __init__(self, limiter: RateLimiter, tenant: TenantRecord, key: KeyRecord) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._allowances = limiter.allowances(tenant, key)
        self._tokens = 0
        self._begun_s: float | None = None
        self._waits = True
        self._reading = False

    def check(self, *, takes_tokens: bool) -> None:
        """Count the request and take its place. Raises Overloaded, InsufficientQuota, RateLimited.

        The place is taken here, since a body that never comes holds one as well as an answer.
        """
        self._limiter.check_room()
        now = self._limiter.clock()
        for allowance in self._allowances:
            allowance.share(now).count_request(now)
        budget = self._tenant.limits.tokens_per_month
        if budget is not None and takes_tokens:
            self._limiter.budget.check(self._tenant.name, budget, self._limiter.wall())
        self._refuse_over_limits(1, int(takes_tokens))
        self._limiter.check_reading(self._tenant.name)
        for allowance in self._allowances:
            allowance.count(1, 0, now)
            allowance.begin(now)
        self._limiter.running += 1
        self._limiter.reading[self._tenant.name] += 1
        self._reading = True

    def body_is_here(self) -> None:
        """Note that the body has come, or never will. A second time does nothing."""
        if not self._reading:
            return
        self._reading = False
        reading, tenant = self._limiter.reading, self._tenant.name
        reading[tenant] -= 1
        if not reading[tenant]:
            del reading[tenant]

    def take_bytes(self, size: int) -> None:
        """Count the bytes of a body that is a pushed adapter, before it comes.

        Raises RateLimited.
        """
        now = self._limiter.clock()
        self._refuse([one.bytes_refusal(size, now) for one in self._allowances])
        for allowance in self._allowances:
            allowance.count_bytes(size, now)

    def reserve(self, tokens: int, base_model: str) -> None:
        """Begin to wait, and reserve these tokens. Raises Overloaded, RateLimited."""
        self._refuse_over_limits(0, tokens)
        now = self._limiter.clock()
        self._queue_time = self._limiter.queue_time(base_model)
        self._queue_time.check(self._tenant.name, self._tenant.weight, now)
        self._queue_time.enter(self._tenant.name, self._tenant.weight, now)
        self._begun_s = now
        for allowance in self._allowances:
            allowance.count(0, tokens, now)
        self._tokens = tokens

    def first_token(self) -> None:
        """End the wait for a first token. A second time does nothing."""
        if self._waits:
            self._waits = False
            self._queue_time.begin(self._tenant.name, self._limiter.clock())

    def settle(self, tokens: int) -> None:
        """Count what the request took instead of what was reserved."""
        for allowance in self._allowances:
            allowance.count(0, tokens - self._tokens, self._limiter.clock())
        self._tokens = tokens

    def release(self) -> None:
        """End the request; what it took counts against the budget."""
        now = self._limiter.clock()
        self._limiter.running -= 1
        took_s = None
        self.body_is_here()
        if self._begun_s is not None:
            took_s = now - self._begun_s
            self._queue_time.leave(self._tenant.name, now, begun=not self._waits)
        for allowance in self._allowances:
            allowance.end(now, took_s)
        if self._tenant.limits.tokens_per_month is not None:
            self._limiter.budget.settle(self._tenant.name, self._tokens, self._limiter.wall())

    def limit_statuses(self) -> list[LimitStatus]:
        """How its limits per minute stand: of the tenant's and the key's the tighter ones."""
        now = self._limiter.clock()
        tightest: dict[str, LimitStatus] = {}
        for status in (each for one in self._allowances for each in one.limit_statuses(now)):
            other = tightest.get(status.kind, status)
            tightest[status.kind] = min(status, other, key=lambda each: each.remaining)
        return list(tightest.values())

    def _refuse_over_limits(self, requests: int, tokens: int) -> None:
        """Raises the RateLimited that lasts longest where so much may not begin now."""
        now = self._limiter.clock()
        self._refuse([one.refusal(requests, tokens, now) for one in self._allowances])

    def _refuse(self, found: Sequence[RateLimited | None]) -> None:
        """Raises the one that lasts longest, if there is any."""
        refusals = [refusal for refusal in found if refusal is not None]
        if refusals:
            longest = max(refusals, key=lambda refusal: refusal.retry_after_s or 0.0)
            longest.limits = self.limit_statuses()
            raise longest


def _any_limit(limits: Limits) -> bool:
    """Whether there is one that a gateway counts for."""
    per_min = (limits.requests_per_min, limits.tokens_per_min, limits.bytes_per_min)
    return any(limit is not None for limit in (*per_min, limits.max_concurrent))
