"""Gateways of one service, on a clock for tests."""

from collections.abc import Sequence
from typing import Any

from lorikeet.catalog.records import KeyRecord, Limits, TenantRecord
from lorikeet.tenancy.limit_shares import LimitShares
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Gateway:
    """Rate limiter of one gateway, and its shares of tenants' limits."""

    def __init__(
        self,
        clock: Clock,
        name: str = "g0",
        gateways: int = 1,
        most: int | None = None,
        budget: MonthlyBudget | None = None,
        **line: Any,
    ) -> None:
        self.clock = clock
        self.shares = LimitShares(name, gateways, clock())
        self.limiter = RateLimiter(
            self.shares, budget or MonthlyBudget(None), most, clock, clock, **line
        )

    def check(
        self, limits: Limits, tenant: str = "acme", key_id: str = "k1", of_key: Limits | None = None
    ) -> RateLimitHold:
        record = TenantRecord(tenant, 0.0, limits)
        key = KeyRecord(key_id, tenant, frozenset(), "", 0.0, limits=of_key or Limits())
        return self.limiter.check(record, key)

    def enter(self, limits: Limits, tokens: int = 1, **who: object) -> RateLimitHold:
        hold = self.check(limits, **who)  # type: ignore[arg-type]
        hold.reserve(tokens, "base")
        return hold


def settled(clock: Clock, **options: object) -> Gateway:
    """Make the only gateway, and let an hour pass, so that it does not count as new."""
    gateway = Gateway(clock, **options)  # type: ignore[arg-type]
    agree([gateway])
    clock.now += 3600
    return gateway


def agree(gateways: Sequence[Gateway]) -> None:
    """Let every gateway agree on its shares with the others, all of which answer."""
    for gateway in gateways:
        now = gateway.clock()
        statement = gateway.shares.claim(now)
        others = [each for each in gateways if each is not gateway]
        answers = [other.shares.answer(statement, now) for other in others]
        gateway.shares.agree(answers, complete=True, now=now)
        gateway.limiter.apply_shares()
