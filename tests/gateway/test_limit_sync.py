"""A gateway keeps agreeing on shares and reading usage after any failure."""

import asyncio
import time
from typing import Any

import pytest

from lorikeet.catalog.records import KeyRecord, Limits, TenantRecord
from lorikeet.errors import InsufficientQuota, StoreError
from lorikeet.gateway import limit_sync
from lorikeet.gateway.limit_sync import LimitSync
from lorikeet.tenancy.limit_shares import LimitShares, Subject
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter
from lorikeet.usage.ledger import UsageCounts
from tests.gateway.linked_peers import LinkedPeers, link
from tests.waiting import until

KEY = KeyRecord("k", "acme", frozenset(), "", 0.0)


class Gateway:
    """One of several gateways in one process, connected directly."""

    def __init__(self, name: str, others: list["Gateway"], written: Any = None) -> None:
        self.peers = LinkedPeers()
        self.shares = LimitShares(name, 2, time.monotonic())
        budget = MonthlyBudget(written, unseen_s=0)
        self.rate_limiter = RateLimiter(self.shares, budget)
        self.limit_sync = LimitSync(self.peers, self.shares, self.rate_limiter)
        others.append(self)
        link([each.peers for each in others])

    def share(self) -> float:
        return self.shares.share_of(Subject("acme"), time.monotonic()).share

    def check(self, **limits: Any) -> None:
        self.rate_limiter.check(TenantRecord("acme", 0.0, Limits(**limits)), KEY).release()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_sync, "ROUND_S", 0.01)


def run(scenario: Any, gateways: list[Gateway]) -> None:
    async def inside() -> None:
        loops = [asyncio.create_task(each.limit_sync.run()) for each in gateways]
        try:
            await scenario
        finally:
            for loop in loops:
                loop.cancel()

    asyncio.run(inside())


def test_gateways_agree_and_go_on_after_trouble(caplog: pytest.LogCaptureFixture) -> None:
    both: list[Gateway] = []
    first, second = Gateway("g0", both), Gateway("g1", both)

    async def scenario() -> None:
        for _ in range(100):
            first.check(max_concurrent=1)
        await until(lambda: first.share() > 0.8 and second.share() < 0.2)
        first.peers.trouble = ZeroDivisionError("a bug, a lost controller, anything")
        await until(lambda: caplog.records)
        for _ in range(10000):
            second.check(max_concurrent=1)
        await asyncio.sleep(0.1)
        assert first.share() > 0.8  # the last share holds
        first.peers.trouble = None
        await until(lambda: first.share() < 0.2 and second.share() > 0.8)

    run(scenario(), both)
    assert [record.msg for record in caplog.records] == ["peers_unreachable"]


class Written:
    def __init__(self) -> None:
        self.failures = 3
        self.tokens = 0

    def of(self, tenant: str) -> UsageCounts:
        return UsageCounts(output_tokens=self.tokens)

    def refresh(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("the store is away")
        self.tokens = 100


def test_a_budget_is_read_as_soon_as_the_store_answers(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway("g0", [], Written())

    async def scenario() -> None:
        gateway.check(tokens_per_month=100)  # nothing is known yet

        def exhausted() -> bool:
            try:
                gateway.check(tokens_per_month=100)
            except InsufficientQuota:
                return True
            return False

        await until(exhausted)

    run(scenario(), [gateway])
    assert [record.msg for record in caplog.records] == ["usage_unreadable"]
