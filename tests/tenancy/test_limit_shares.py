"""LimitShares of several gateways: follow demand, and never add up to more than the limit."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.catalog.records import KeyRecord, Limits, TenantRecord
from lorikeet.errors import RateLimited
from lorikeet.tenancy.limit_shares import (
    DOUBT_S,
    FLOOR,
    GONE_S,
    GatewayClaims,
    LimitShares,
    Subject,
)
from tests.tenancy.gateways import Clock, Gateway, agree

ACME = Subject("acme")
EXACT = 1e-6


class Round:
    """Round of one gateway that has asked the others and lacks some answers."""

    def __init__(self, shares: LimitShares, others: dict[str, LimitShares], now: float) -> None:
        self.shares = shares
        self.statement = shares.claim(now)
        self.waiting = dict(others)
        self.answers: list[GatewayClaims] = []

    def reach(self, name: str, now: float) -> None:
        other = self.waiting.pop(name, None)
        if other is not None:
            self.answers.append(other.answer(self.statement, now))

    def end(self, now: float) -> None:
        self.shares.agree(self.answers, complete=not self.waiting, now=now)


class Fleet:
    """Gateways whose rounds are cut into steps that run in any order."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.count = count
        self.born = 0
        self.gateways: dict[str, LimitShares] = {}
        self.rounds: dict[str, Round] = {}
        for _ in range(count):
            self.start()
        self.settle(2)

    def start(self) -> str:
        name = f"g{self.born}"
        self.born += 1
        self.gateways[name] = LimitShares(name, self.count, self.now)
        return name

    def stop(self, name: str) -> None:
        """Remove a gateway: it dies, and Serve no longer lists it."""
        del self.gateways[name]
        self.rounds.pop(name, None)
        for each in self.rounds.values():
            each.waiting.pop(name, None)

    def ask(self, name: str, requests: int, subject: Subject = ACME) -> None:
        for _ in range(requests):
            self.gateways[name].share_of(subject, self.now).count_request(self.now)

    def begin(self, name: str) -> None:
        if name not in self.rounds:
            others = {other: shares for other, shares in self.gateways.items() if other != name}
            self.rounds[name] = Round(self.gateways[name], others, self.now)

    def settle(self, rounds: int) -> None:
        """Run whole rounds, a second apart."""
        for _ in range(rounds):
            for name in list(self.gateways):
                self.begin(name)
                for other in self.gateways:
                    self.rounds[name].reach(other, self.now)
                self.rounds.pop(name).end(self.now)
            self.now += 1

    def shares(self, subject: Subject = ACME) -> list[float]:
        return [each.share_of(subject, self.now).share for each in self.gateways.values()]


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "begin", "reach", "reach all", "end", "wait"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=20,
    max_size=120,
)


@settings(deadline=None)
@given(count=st.integers(2, 4), steps=steps)
def test_shares_never_add_up_to_more_than_the_whole_however_late_answers_are(
    count: int, steps: list[tuple[str, int, int]]
) -> None:
    fleet = Fleet(count)
    for step, first, second in steps:
        name, other = f"g{first % count}", f"g{second % count}"
        match step:
            case "ask":
                fleet.ask(name, 40)
            case "begin":
                fleet.begin(name)
            case "reach" if name in fleet.rounds:
                fleet.rounds[name].reach(other, fleet.now)
            case "reach all" if name in fleet.rounds:
                for each in fleet.gateways:
                    fleet.rounds[name].reach(each, fleet.now)
            case "end" if name in fleet.rounds:
                fleet.rounds.pop(name).end(fleet.now)
            case "wait":
                fleet.now += 0.4
        assert sum(fleet.shares()) <= 1 + EXACT
    fleet.settle(4)
    assert 0.9 <= sum(fleet.shares()) <= 1 + EXACT  # demand that fades is a little behind


def test_of_two_concurrent_claims_at_least_one_sees_the_other() -> None:
    fleet = Fleet(3)
    fleet.ask("g2", 1000)
    fleet.settle(3)
    fleet.now += 60
    fleet.settle(1)
    fleet.ask("g0", 1000)
    fleet.begin("g0")
    for other in ("g1", "g2"):
        fleet.rounds["g0"].reach(other, fleet.now)
    fleet.ask("g1", 1000)
    fleet.begin("g1")
    for other in ("g0", "g2"):
        fleet.rounds["g1"].reach(other, fleet.now)
    for name in ("g1", "g0"):
        fleet.rounds.pop(name).end(fleet.now)
        assert sum(fleet.shares()) <= 1 + EXACT


def test_shares_follow_demand_within_three_rounds() -> None:
    fleet = Fleet(3)
    assert fleet.shares() == pytest.approx([1 / 3] * 3)
    fleet.ask("g1", 1000)
    fleet.settle(3)
    assert fleet.shares() == pytest.approx([FLOOR / 3, 1 - 2 * FLOOR / 3, FLOOR / 3], abs=0.02)
    fleet.now += 60
    fleet.ask("g0", 1000)
    fleet.settle(3)
    assert fleet.shares()[0] == pytest.approx(1 - 2 * FLOOR / 3, abs=0.02)


def test_a_few_requests_hardly_move_shares() -> None:
    fleet = Fleet(2)
    fleet.ask("g0", 1)
    fleet.settle(3)
    assert fleet.shares() == pytest.approx([0.5, 0.5], abs=0.05)


def test_without_answers_shares_stay() -> None:
    fleet = Fleet(3)
    fleet.ask("g1", 1000)
    fleet.settle(3)
    before = fleet.shares()
    for _ in range(100):
        fleet.now += 1
        fleet.ask("g0", 100)
        for name in fleet.gateways:
            fleet.begin(name)
            fleet.rounds.pop(name).end(fleet.now)  # before anybody was reached
    assert fleet.shares() == before


def test_a_new_gateway_adds_no_more_than_the_least_share_until_it_has_agreed() -> None:
    fleet = Fleet(2)
    fleet.ask("g0", 1000)
    fleet.ask("g1", 1000)
    fleet.settle(3)
    new = fleet.start()
    fleet.ask(new, 1000)
    assert sum(fleet.shares()) <= 1 + FLOOR / 2 + EXACT
    fleet.settle(3)
    assert sum(fleet.shares()) <= 1 + EXACT
    assert fleet.shares()[2] > 0.25


def test_a_dead_gateways_share_goes_to_the_others() -> None:
    fleet = Fleet(2)
    fleet.ask("g0", 1000)
    fleet.ask("g1", 1000)
    fleet.settle(3)
    fleet.stop("g1")
    for _ in range(int(GONE_S) + 3):
        assert sum(fleet.shares()) <= 1 + EXACT
        fleet.settle(1)
    assert fleet.shares() == pytest.approx([1])


def test_a_gateway_without_answers_takes_the_even_share_after_a_while() -> None:
    shares = LimitShares("new", 4, 0.0)
    for second in range(int(DOUBT_S) + 2):
        own = shares.share_of(ACME, second)
        assert own.share == (FLOOR / 4 if second <= DOUBT_S else 0.25)
        shares.claim(second)
        shares.agree([], complete=False, now=second + 0.5)


def test_idle_subjects_are_forgotten() -> None:
    fleet = Fleet(2)
    fleet.ask("g0", 10)
    fleet.settle(3)
    assert fleet.gateways["g1"].claim(fleet.now).claims.keys() == {ACME}
    fleet.now += 300
    fleet.settle(1)
    assert not fleet.gateways["g1"].claim(fleet.now).claims
    assert fleet.shares() == pytest.approx([0.5, 0.5])


def passed(
    gateways: list[Gateway],
    clock: Clock,
    limits: Limits,
    seconds: int,
    seed: int,
    most_tokens: int = 1,
) -> list[float]:
    """Return the times of the tokens used by admitted requests, among far too many, while demand
    moves around.

    most_tokens: most tokens that a request reserves; it uses some of them.
    """
    chance = random.Random(seed)
    times = []
    for tick in range(seconds * 10):
        clock.now += 0.1
        if tick % 10 == 0:
            agree(gateways)
        if tick % 70 == 0:
            busy = chance.choice(gateways)
        for gateway in [busy] * 8 + gateways:
            reserved = chance.randint(1, most_tokens)
            try:
                hold = gateway.enter(limits, reserved)
            except RateLimited:
                continue
            used = chance.randint(1, reserved)
            hold.settle(used)
            hold.release()
            times += [clock.now] * used
    return times


def most_in(times: list[float], window_s: float) -> int:
    return max(sum(at <= each < at + window_s for each in times) for at in times)


@pytest.mark.parametrize("seed", range(2))
def test_in_any_minute_all_gateways_together_admit_what_one_would(seed: int) -> None:
    clock = Clock()
    gateways = [Gateway(clock, f"g{i}", 3) for i in range(3)]
    agree(gateways)
    clock.now += 600
    limits = Limits(requests_per_min=120, burst_s=30)
    times = passed(gateways, clock, limits, 150, seed)
    burst, a_minute = 60, 120
    assert most_in(times, 60) <= burst + a_minute + len(gateways)
    assert len(times) <= burst + 2.5 * a_minute + len(gateways)
    assert len(times) >= 0.9 * 2.5 * a_minute  # nor is much lost while shares move


def test_two_gateways_exceed_a_limit_on_tokens_by_a_request_each_at_most() -> None:
    clock, most_tokens = Clock(), 40
    gateways = [Gateway(clock, f"g{i}", 2) for i in range(2)]
    agree(gateways)
    clock.now += 600
    limits = Limits(tokens_per_min=600, burst_s=30)
    times = passed(gateways, clock, limits, 150, 0, most_tokens)
    burst, a_minute = 300, 600
    assert most_in(times, 60) <= burst + a_minute + len(gateways) * most_tokens
    assert len(times) >= 0.9 * 2.5 * a_minute


def test_a_restart_gives_no_second_burst() -> None:
    clock = Clock()
    gateways = [Gateway(clock, f"g{i}", 2) for i in range(2)]
    agree(gateways)
    clock.now += 600
    limits = Limits(requests_per_min=600, burst_s=60)
    times = passed(gateways, clock, limits, 1, seed=1)
    restarts = 20
    for number in range(restarts):
        gateways[1] = Gateway(clock, f"again{number}", 2)
        times += passed(gateways, clock, limits, 3, seed=number)
    rate_per_s, burst, least = 10, 600, FLOOR / 2
    at_a_restart = burst * least + 1
    assert len(times) <= burst + rate_per_s * 61 + restarts * at_a_restart


def test_requests_at_once_are_bounded_over_all_gateways() -> None:
    clock = Clock()
    gateways = [Gateway(clock, f"g{i}", 2) for i in range(2)]
    agree(gateways)
    limits = Limits(max_concurrent=10)
    running = 0
    for busy in (0, 1, 0, 1):
        for _ in range(40):
            clock.now += 0.1
            try:
                gateways[busy].enter(limits)
                running += 1
            except RateLimited:
                pass
            agree(gateways)
        assert running <= 10
    assert running == 10


def test_gateways_show_as_used_what_they_admitted_though_their_shares_move() -> None:
    clock, limits = Clock(), Limits(requests_per_min=600)
    tenant, key = TenantRecord("acme", 0.0, limits), KeyRecord("k", "acme", frozenset(), "", 0.0)

    def used() -> list[float | None]:
        return [each.limiter.uses(tenant, key)["tenant"][0].used for each in gateways]

    gateways = [Gateway(clock, f"g{number}", 2) for number in range(2)]
    assert used() == [0, 0]
    for _ in range(3):
        agree(gateways)
        clock.now += 0.1
    assert used() == [0, 0], "their buckets are not full, as their shares have grown"
    for _ in range(20):
        gateways[0].enter(limits)
    assert used()[0] == 40
    clock.now += 60
    assert used() == [0, 0]
