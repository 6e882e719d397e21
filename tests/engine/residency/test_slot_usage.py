"""Tenants' use of slots: leased time, and loads."""

import random
from collections import defaultdict

import pytest

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.gpu.slot_usage import SlotUsage, SlotUser
from tests.engine.residency.tiers_driver import make

A = AdapterRef("acme", "support", 1, "a" * 64)
B = AdapterRef("acme", "sales", 1, "b" * 64)
ACME, GLOBEX = SlotUser("acme", A), SlotUser("globex", A)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def usage(clock):
    return SlotUsage(clock)


def taken(usage):
    return {(use.tenant, use.ref): use.leased_s for use in usage.take()}


def test_overlapping_leases_of_one_tenant_count_once(usage, clock):
    usage.leased(ACME)
    clock.now_s += 2
    usage.leased(ACME)
    clock.now_s += 3
    usage.ended(ACME)
    clock.now_s += 4
    usage.ended(ACME)
    clock.now_s += 50
    assert taken(usage) == {ACME: 9.0}


def test_tenants_that_share_an_adapter_share_its_time(usage, clock):
    usage.leased(ACME)
    clock.now_s += 2
    usage.leased(GLOBEX)
    usage.leased(GLOBEX)
    clock.now_s += 4
    usage.ended(ACME)
    clock.now_s += 8
    usage.ended(GLOBEX)
    usage.ended(GLOBEX)
    assert taken(usage) == {ACME: 4.0, GLOBEX: 10.0}


def test_a_continuing_lease_reports_each_second_once(usage, clock):
    usage.leased(ACME)
    clock.now_s += 2
    assert taken(usage) == {ACME: 2.0}
    clock.now_s += 1
    usage.ended(ACME)
    assert taken(usage) == {ACME: 1.0}
    assert taken(usage) == {}


def test_the_shares_of_all_tenants_add_up_to_the_leased_time(usage, clock):
    rng, open_, leased_s = random.Random(7), [], defaultdict(float)
    taken_s = 0.0
    uses = [SlotUser(tenant, ref) for tenant in "xyz" for ref in (A, B)]
    for _ in range(2000):
        step_s = rng.random()
        clock.now_s += step_s
        for digest in {use.ref.digest for use in open_}:
            leased_s[digest] += step_s
        if open_ and rng.random() < 0.5:
            usage.ended(open_.pop(rng.randrange(len(open_))))
        else:
            open_.append(rng.choice(uses))
            usage.leased(open_[-1])
        if rng.random() < 0.1:
            taken_s += sum(taken(usage).values())
    taken_s += sum(taken(usage).values())
    assert taken_s == pytest.approx(sum(leased_s.values()))


def test_a_load_counts_for_the_first_tenant_that_requested_it(shelf, bench):
    b, (ref,) = bench(), make(shelf, "a")
    b.tiers.request(ref, "acme")
    b.tiers.request(ref, "globex")
    b.until(lambda: b.tiers.lease(ref, "globex") is not None)
    first, second = sorted(b.tiers.take_use(), key=lambda use: use.tenant)
    assert (first.tenant, first.loads, first.leased_s) == ("acme", 1, 0.0)
    assert first.load_bytes == b.gpu.used_bytes
    assert (second.tenant, second.loads) == ("globex", 0)
    assert second.leased_s > 0


def test_a_load_without_a_request_counts_for_no_tenant(shelf, bench):
    b, (ref,) = bench(), make(shelf, "a")
    b.tiers.prefetch(ref, uses=1.0)
    b.until(lambda: b.gpu.used_bytes > 0)
    assert b.tiers.take_use() == []
