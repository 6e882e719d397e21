"""Limits bound running and admitted requests, and nothing else."""

from contextlib import suppress

import pytest

from lorikeet.catalog.records import KeyRecord, Limits, TenantRecord
from lorikeet.errors import InsufficientQuota, Overloaded, RateLimited
from lorikeet.prices import COST_UNITS
from lorikeet.tenancy.limit_shares import LimitShares
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold
from lorikeet.tenancy.token_bucket import TokenBucket
from lorikeet.usage.ledger import NOTHING, UsageCounts
from tests.tenancy.gateways import Clock, Gateway, agree, settled

NONE = Limits()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gateway(clock: Clock) -> Gateway:
    return settled(clock)


def wait_s(gateway: Gateway, limits: Limits, tokens: int = 1, **who: object) -> float:
    """Return the seconds that a refused request must wait."""
    with pytest.raises(RateLimited) as raised:
        gateway.enter(limits, tokens, **who)
    assert raised.value.retry_after_s is not None
    return raised.value.retry_after_s


def test_the_use_shown_follows_a_smaller_share_and_a_lower_limit() -> None:
    bucket = TokenBucket("tokens", 6000, 60.0, 1.0, 0.0)
    bucket.count(3000, 0.0)
    bucket.change(6000, 60.0, 0.5, 0.0)
    assert bucket.used(0.0) == 3000
    bucket.change(60, 60.0, 0.5, 0.0)
    assert (bucket.used(0.0), bucket.used(30.0)) == (30, 0)


def test_requests_are_admitted_up_to_the_burst_and_then_at_the_rate(
    gateway: Gateway, clock: Clock
) -> None:
    limits = Limits(requests_per_min=30, burst_s=20)
    for _ in range(10):
        gateway.enter(limits).release()
    assert wait_s(gateway, limits) == pytest.approx(2)
    clock.now += 1.9
    assert wait_s(gateway, limits) == pytest.approx(0.1)
    for _ in range(5):
        clock.now += 2
        gateway.enter(limits).release()
    assert wait_s(gateway, limits) <= 2


@pytest.mark.parametrize("limits", [Limits(requests_per_min=7), Limits(tokens_per_min=1000)])
def test_a_client_that_waits_for_retry_after_is_admitted(
    gateway: Gateway, clock: Clock, limits: Limits
) -> None:
    waits = 0
    for tokens in (50, 400, 3, 170, 90) * 20:
        for _ in range(3):  # one wait for some tokens, one more for all once the body is read
            try:
                gateway.enter(limits, tokens).release()
                break
            except RateLimited as refusal:
                waits += 1
                clock.now += (refusal.retry_after_s or 0) + 1e-6
        else:
            pytest.fail("it was told to wait again and again")
    assert waits > 50


def test_pushed_bytes_are_admitted_up_to_the_burst_and_then_at_the_rate(
    gateway: Gateway, clock: Clock
) -> None:
    limits = Limits(bytes_per_min=6000)
    for _ in range(3):
        gateway.enter(limits).take_bytes(2000)
    with pytest.raises(RateLimited) as refused:
        gateway.enter(limits).take_bytes(1000)
    assert refused.value.retry_after_s == pytest.approx(10)
    assert "6000 bytes per minute is this tenant's limit" in refused.value.message
    clock.now += 10
    gateway.enter(limits).take_bytes(1000)


def test_a_debt_of_pushed_bytes_refuses_no_request(gateway: Gateway) -> None:
    limits = Limits(bytes_per_min=60, requests_per_min=10)
    gateway.enter(limits).take_bytes(10_000)
    gateway.enter(limits).release()


def test_reserved_tokens_are_replaced_by_the_tokens_used(gateway: Gateway) -> None:
    limits = Limits(tokens_per_min=600)
    hold = gateway.enter(limits, 500)
    assert wait_s(gateway, limits, 200) == pytest.approx(10)
    hold.settle(100)
    hold.release()
    gateway.enter(limits, 495).release()
    assert wait_s(gateway, limits, 10) == pytest.approx(0.5)


def test_an_answer_longer_than_reserved_is_paid_afterwards(gateway: Gateway, clock: Clock) -> None:
    limits = Limits(tokens_per_min=600)
    hold = gateway.enter(limits, 10)
    hold.settle(900)
    hold.release()
    assert wait_s(gateway, limits, 1) == pytest.approx(30.1)


def test_a_request_larger_than_the_burst_is_admitted_by_a_full_bucket(
    gateway: Gateway, clock: Clock
) -> None:
    limits = Limits(tokens_per_min=600, burst_s=10)
    gateway.enter(limits, 400).release()
    assert wait_s(gateway, limits, 1) == pytest.approx(30.1)
    clock.now += 31
    assert wait_s(gateway, limits, 400) == pytest.approx(9)


def test_reserved_tokens_count_if_they_are_never_settled(gateway: Gateway) -> None:
    limits = Limits(tokens_per_min=600)
    gateway.enter(limits, 590).release()
    assert wait_s(gateway, limits, 20) == pytest.approx(1)


def test_a_keys_limits_apply_in_addition_to_its_tenants(gateway: Gateway) -> None:
    tenant, key = Limits(requests_per_min=3), Limits(requests_per_min=2)
    for _ in range(2):
        gateway.enter(tenant, of_key=key).release()
    with pytest.raises(RateLimited, match="2 requests per minute is this key's limit"):
        gateway.enter(tenant, of_key=key)
    gateway.enter(tenant, key_id="k2", of_key=key).release()
    with pytest.raises(RateLimited, match="3 requests per minute is this tenant's limit"):
        gateway.enter(tenant, key_id="k3")


def test_a_request_refused_by_one_limit_counts_for_no_other(gateway: Gateway) -> None:
    tenant, key = Limits(requests_per_min=2), Limits(requests_per_min=1)
    gateway.enter(tenant, of_key=key).release()
    for _ in range(5):
        wait_s(gateway, tenant, of_key=key)
    gateway.enter(tenant, key_id="k2").release()


def test_tenants_do_not_share_limits(gateway: Gateway) -> None:
    limits = Limits(requests_per_min=1, tokens_per_min=10, max_concurrent=1)
    gateway.enter(limits, 10, tenant="acme")
    gateway.enter(limits, 10, tenant="globex")
    wait_s(gateway, limits, tenant="acme")


def test_requests_at_once_are_bounded_and_ended_requests_free_their_places(
    gateway: Gateway, clock: Clock
) -> None:
    limits = Limits(max_concurrent=2)
    for _ in range(3):
        holds = [gateway.enter(limits), gateway.enter(limits)]
        assert wait_s(gateway, limits) > 0
        clock.now += 8
        for hold in holds:
            hold.release()


@pytest.mark.parametrize(
    "before", [Limits(), Limits(max_concurrent=9), Limits(tokens_per_min=9000)]
)
@pytest.mark.parametrize("of_key", [False, True], ids=["tenant", "key"])
def test_a_new_limit_on_requests_at_once_counts_running_requests(
    gateway: Gateway, before: Limits, of_key: bool
) -> None:
    def enter(limits: Limits) -> RateLimitHold:
        return gateway.enter(Limits(), of_key=limits) if of_key else gateway.enter(limits)

    running = [enter(before) for _ in range(8)]
    for hold in running[:5]:
        with pytest.raises(RateLimited):
            enter(Limits(max_concurrent=3))
        hold.release()
    with pytest.raises(RateLimited):
        enter(Limits(max_concurrent=3))
    running[5].release()
    enter(Limits(max_concurrent=3))
    with pytest.raises(RateLimited):
        enter(Limits(max_concurrent=3))


def test_a_new_limit_counts_requests_that_run_in_other_gateways(clock: Clock) -> None:
    one, other = gateways = [Gateway(clock, name, 2) for name in ("g0", "g1")]
    agree(gateways)
    running = [other.enter(Limits()) for _ in range(8)]
    with suppress(RateLimited):  # within its share, until the gateways have agreed
        one.enter(Limits(max_concurrent=6)).release()
    agree(gateways)
    with pytest.raises(RateLimited):
        one.enter(Limits(max_concurrent=6))
    for hold in running:
        hold.release()
    agree(gateways)
    one.enter(Limits(max_concurrent=6))


def test_retry_after_at_the_concurrency_limit_follows_the_duration_of_requests(
    gateway: Gateway, clock: Clock
) -> None:
    limits = Limits(max_concurrent=1)
    for _ in range(60):
        hold = gateway.enter(limits)
        clock.now += 12
        hold.release()
    gateway.enter(limits)
    assert wait_s(gateway, limits) == pytest.approx(12, rel=0.01)


def test_a_request_counts_before_its_body_is_read_and_no_longer_if_none_comes(
    gateway: Gateway, clock: Clock
) -> None:
    limits = Limits(max_concurrent=1)
    hold = gateway.check(limits)
    with pytest.raises(RateLimited, match="1 requests at once is this tenant's limit"):
        gateway.check(limits)
    clock.now += 600
    hold.release()
    gateway.enter(limits)
    assert wait_s(gateway, limits) == pytest.approx(1)  # not what the body took to fail


def test_a_request_counts_once(gateway: Gateway) -> None:
    limits = Limits(max_concurrent=2)
    for hold in [gateway.check(limits), gateway.check(limits)]:
        hold.body_is_here()
        hold.reserve(1, "base")
        hold.release()
    assert gateway.limiter.running == 0
    assert not gateway.limiter.reading


def test_one_tenants_requests_without_bodies_leave_capacity_for_other_tenants(clock: Clock) -> None:
    gateway = settled(clock, most=4)
    holds = [gateway.check(NONE), gateway.check(NONE)]
    with pytest.raises(RateLimited, match="send bodies without delay"):
        gateway.check(NONE)
    gateway.check(NONE, tenant="globex").release()
    holds[0].body_is_here()
    gateway.check(NONE).release()


def test_without_limits_every_request_is_admitted(gateway: Gateway) -> None:
    for _ in range(1000):
        gateway.enter(NONE, 10**6)


def test_a_changed_limit_applies_to_the_next_request(gateway: Gateway) -> None:
    for _ in range(5):
        gateway.enter(Limits(requests_per_min=100, max_concurrent=9))
    wait_s(gateway, Limits(max_concurrent=5))
    gateway.enter(Limits(requests_per_min=1))
    wait_s(gateway, Limits(requests_per_min=1))


def test_limit_statuses_show_the_tighter_limit(gateway: Gateway) -> None:
    tenant = Limits(requests_per_min=60, tokens_per_min=1200)
    hold = gateway.enter(tenant, 300, of_key=Limits(requests_per_min=30))
    statuses = {each.kind: each for each in hold.limit_statuses()}
    assert statuses["requests"][1:] == pytest.approx((30, 29, 2.0))
    assert statuses["tokens"][1:] == pytest.approx((1200, 900, 15.0))


def test_a_refusal_carries_the_limit_statuses(gateway: Gateway) -> None:
    limits = Limits(requests_per_min=2, tokens_per_min=1200)
    gateway.enter(limits, 600)
    gateway.enter(limits, 400)
    with pytest.raises(RateLimited) as raised:
        gateway.enter(limits, 100)
    statuses = {each.kind: each for each in raised.value.limits}
    assert statuses["requests"][1:3] == (2, 0)
    assert statuses["tokens"][1:3] == (1200, 200)


def test_all_tenants_together_stay_within_max_requests(clock: Clock) -> None:
    gateway = settled(clock, most=2)
    hold = gateway.enter(NONE, tenant="acme")
    gateway.enter(NONE, tenant="globex")
    with pytest.raises(Overloaded) as raised:
        gateway.enter(NONE, tenant="initech")
    assert raised.value.retry_after_s
    hold.release()
    gateway.enter(NONE, tenant="initech")


class Written:
    def __init__(self) -> None:
        self.tokens = self.cost = 0
        self.readings = 0

    def of(self, tenant: str) -> UsageCounts:
        return UsageCounts(output_tokens=self.tokens if tenant == "acme" else 0, cost=self.cost)

    def refresh(self) -> None:
        self.readings += 1


def test_a_budget_counts_recorded_usage_and_tokens_settled_since(clock: Clock) -> None:
    written = Written()
    budget = MonthlyBudget(written, unseen_s=30)
    gateway = settled(clock, budget=budget)
    limits = Limits(tokens_per_month=1000)
    written.tokens = 700
    hold = gateway.enter(limits, 50)
    hold.settle(200)
    hold.release()
    gateway.enter(limits, 100).release()
    with pytest.raises(InsufficientQuota):
        gateway.enter(limits)
    gateway.enter(limits, tenant="globex").release()
    # what a reading may not hold yet is still counted; what it holds is not
    written.tokens = 900
    budget.was_read(clock())
    with pytest.raises(InsufficientQuota):
        gateway.enter(limits)
    clock.now += 60
    budget.was_read(clock())
    gateway.enter(limits).release()


def test_a_budget_in_money_counts_recorded_costs_and_those_settled_since(clock: Clock) -> None:
    written = Written()
    gateway = settled(clock, budget=MonthlyBudget(written, unseen_s=30))
    limits = Limits(cost_per_month=1.25, tokens_per_month=10**9)
    written.cost = COST_UNITS
    hold = gateway.enter(limits, 50)
    hold.settle(200, COST_UNITS // 4 - 1)
    hold.release()
    hold = gateway.enter(limits, 50)
    hold.settle(1, 1)
    hold.release()
    with pytest.raises(
        InsufficientQuota, match=r"budget of 1\.25 a month, by the service's prices"
    ):
        gateway.enter(limits)
    gateway.enter(Limits(tokens_per_month=10**9)).release()


def test_retry_after_of_a_used_up_budget_is_the_next_month(clock: Clock) -> None:
    clock.now = 1798761599.0  # the last second of 2026
    budget = MonthlyBudget(None, unseen_s=30)
    budget.settle("acme", UsageCounts(prompt_tokens=4, output_tokens=6), clock())
    with pytest.raises(InsufficientQuota, match="10 tokens a month is used up until 2027-01-01 00"):
        budget.check("acme", Limits(tokens_per_month=10), clock())
    with pytest.raises(InsufficientQuota) as raised:
        budget.check("acme", Limits(tokens_per_month=10), clock())
    assert raised.value.retry_after_s == pytest.approx(1)


def test_recorded_usage_is_read_only_while_a_tenant_has_a_budget(clock: Clock) -> None:
    budget = MonthlyBudget(Written(), unseen_s=30)
    assert not budget.due(clock())
    budget.check("acme", Limits(), clock())
    assert not budget.due(clock())
    budget.check("acme", Limits(tokens_per_month=10), clock())
    assert budget.due(clock())
    budget.was_read(clock())
    budget.check("acme", Limits(cost_per_month=10.0), clock())
    assert not budget.due(clock() + 1)
    assert budget.due(clock() + 60)


def test_recorded_usage_is_read_though_the_systems_clock_went_back() -> None:
    class Nothing:
        def of(self, tenant: str) -> UsageCounts:
            return NOTHING

        def refresh(self) -> None:
            pass

    clock, wall = Clock(), Clock(1e9)
    budget = MonthlyBudget(Nothing(), unseen_s=3600.0)
    limiter = RateLimiter(LimitShares("g0", 1, clock()), budget, None, clock, wall)
    tenant = TenantRecord("acme", 0.0, Limits(tokens_per_month=100))
    key = KeyRecord("k1", "acme", frozenset(), "", 0.0)
    hold = limiter.check(tenant, key)
    hold.reserve(120, "base")
    hold.settle(120)
    hold.release()
    budget.was_read(clock())  # too early to include these tokens
    wall.now -= 3600.0
    clock.now += 3700.0
    with pytest.raises(InsufficientQuota):
        limiter.check(tenant, key)
    assert budget.due(clock())
    budget.was_read(clock())
    limiter.check(tenant, key)
