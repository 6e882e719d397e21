"""Limits on requests that generate nothing."""

import pytest

from lorikeet.errors import RateLimited
from lorikeet.tenancy.read_limiter import BURST_S, MAX_RUNNING, READS_PER_MIN, ReadLimiter
from tests.tenancy.gateways import Clock

BURST = int(READS_PER_MIN / 60 * BURST_S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> ReadLimiter:
    return ReadLimiter(clock)


def test_a_tenant_reads_at_its_rate_after_a_burst(limiter: ReadLimiter, clock: Clock) -> None:
    for _ in range(BURST):
        limiter.count("acme")
    with pytest.raises(RateLimited) as refused:
        limiter.count("acme")
    assert refused.value.retry_after_s == pytest.approx(60 / READS_PER_MIN)
    clock.now += 61 / READS_PER_MIN
    limiter.count("acme")


def test_one_tenants_reads_do_not_use_up_other_tenants_reads(limiter: ReadLimiter) -> None:
    limiter.count("acme", 10 * BURST)
    with pytest.raises(RateLimited):
        limiter.count("acme")
    limiter.count("globex")


def test_a_request_larger_than_a_burst_is_paid_off_by_waiting(
    limiter: ReadLimiter, clock: Clock
) -> None:
    limiter.count("acme", 2 * BURST)
    clock.now += BURST_S
    with pytest.raises(RateLimited):
        limiter.count("acme")
    clock.now += 1.0
    limiter.count("acme")


def test_a_tenants_waiting_reads_are_bounded(limiter: ReadLimiter) -> None:
    running = [limiter.reading("acme") for _ in range(MAX_RUNNING)]
    for each in running:
        each.__enter__()
    with pytest.raises(RateLimited, match="wait for one to end"), limiter.reading("acme"):
        pass
    with limiter.reading("globex"):
        pass
    running[0].__exit__(None, None, None)
    with limiter.reading("acme"):
        pass
