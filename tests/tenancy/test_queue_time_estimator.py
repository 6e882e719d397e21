"""Requests that would wait too long are refused at once, with a time to retry."""

import random
import statistics
from collections import Counter

import pytest

from lorikeet.errors import Overloaded
from lorikeet.tenancy.queue_time_estimator import QueueTimeEstimator

MAX_RUNNING = 32
MAX_QUEUE_S = 60.0
STEP_S = 0.1


class Service:
    """Engines that run MAX_RUNNING requests at once, for answer_s on average, fair by tenant."""

    def __init__(self, answer_s: float, **weights: float) -> None:
        self.answer_s = answer_s
        self.now = 1000.0
        self.line = QueueTimeEstimator(MAX_RUNNING, MAX_QUEUE_S, self.now)
        self.weights = weights or {"acme": 1.0}
        self.waiting: list[tuple[str, float]] = []
        self.running: list[tuple[str, float]] = []
        self.waits_s: list[float] = []
        self.served = Counter[str]()
        self._dice = random.Random(0)

    def ask(self, tenant: str = "acme") -> float | None:
        """Return the seconds after which to retry; None if the request is admitted."""
        weight = self.weights[tenant]
        try:
            self.line.check(tenant, weight, self.now)
        except Overloaded as refusal:
            return refusal.retry_after_s or 0.0
        self.line.enter(tenant, weight, self.now)
        self.waiting.append((tenant, self.now))
        return None

    def run(self, seconds: float, **per_s: float) -> dict[str, list[float]]:
        """Send requests at a rate per tenant; return the refusals' retry times by tenant."""
        refusals: dict[str, list[float]] = {tenant: [] for tenant in per_s}
        due = dict.fromkeys(per_s, 0.0)
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for tenant, rate in per_s.items():
                due[tenant] += rate * STEP_S
                while due[tenant] >= 1:
                    due[tenant] -= 1
                    if (wait_s := self.ask(tenant)) is not None:
                        refusals[tenant].append(wait_s)
            self._step()
        return refusals

    def _step(self) -> None:
        for tenant, until in [one for one in self.running if one[1] <= self.now]:
            self.running.remove((tenant, until))
            self.line.leave(tenant, self.now, begun=True)
        while self.waiting and len(self.running) < MAX_RUNNING:
            turn = min(self.waiting, key=lambda one: self.served[one[0]] / self.weights[one[0]])
            tenant, came = turn
            self.waiting.remove(turn)
            self.served[tenant] += 1
            self.waits_s.append(self.now - came)
            self.line.begin(tenant, self.now)
            self.running.append((tenant, self.now + self._dice.uniform(0, 2) * self.answer_s))


def test_requests_within_the_running_capacity_are_admitted_however_slow() -> None:
    service = Service(answer_s=1e6)
    for _ in range(MAX_RUNNING):
        assert service.ask() is None
        service.run(100)


def test_a_flood_is_refused_once_its_wait_would_be_too_long() -> None:
    service = Service(answer_s=8)
    refusals = service.run(600, acme=20)["acme"]
    assert len(refusals) > 0.7 * 20 * 600
    assert all(1 <= wait_s <= MAX_QUEUE_S for wait_s in refusals)
    steady = service.waits_s[len(service.waits_s) // 2 :]
    assert statistics.fmean(steady) == pytest.approx(MAX_QUEUE_S, rel=0.1)
    assert max(steady) < 1.3 * MAX_QUEUE_S


def test_a_client_that_retries_after_retry_after_is_soon_admitted() -> None:
    service = Service(answer_s=8)
    service.run(100, acme=20)
    for _ in range(20):
        service.run(10, acme=20)
        told_s = 0.0
        while (wait_s := service.ask()) is not None:
            service.run(wait_s)
            told_s += wait_s
        assert told_s < 0.2 * MAX_QUEUE_S


def test_a_burst_is_admitted_while_there_is_no_estimate() -> None:
    service = Service(answer_s=0.1)
    assert [service.ask() for _ in range(1000)] == [None] * 1000
    service.run(20)
    assert not service.waiting


def test_a_fast_queue_refuses_no_request() -> None:
    service = Service(answer_s=8)
    assert service.run(600, acme=3.9)["acme"] == []


def test_the_estimate_follows_engines_that_become_faster() -> None:
    service = Service(answer_s=32)
    assert service.run(300, acme=20)["acme"]
    service.answer_s = 1
    service.run(60, acme=20)
    assert service.run(100, acme=20)["acme"] == []


def test_a_tenant_that_floods_the_service_lengthens_only_its_own_queue() -> None:
    service = Service(answer_s=8, noisy=1.0, quiet=1.0)
    service.run(100, noisy=20)
    refusals = service.run(600, noisy=20, quiet=1)
    assert refusals["quiet"] == []
    assert len(refusals["noisy"]) > 0.7 * 20 * 600


def test_a_tenant_of_higher_weight_may_have_a_longer_queue() -> None:
    service = Service(answer_s=8, heavy=3.0, light=1.0)
    service.run(600, heavy=20, light=20)
    waiting = Counter(tenant for tenant, _ in service.waiting)
    assert waiting["heavy"] == pytest.approx(3 * waiting["light"], rel=0.2)


def test_requests_that_leave_no_longer_count_as_waiting() -> None:
    service = Service(answer_s=8)
    service.run(300, acme=20)
    assert service.ask() is not None
    for tenant, _ in service.waiting:
        service.line.leave(tenant, service.now, begun=False)
    service.waiting.clear()
    assert service.ask() is None


@pytest.mark.parametrize(
    "line", [QueueTimeEstimator(None, 60.0, 0.0), QueueTimeEstimator(1, None, 0.0)]
)
def test_without_a_bound_every_request_is_admitted(line: QueueTimeEstimator) -> None:
    for second in range(1000):
        line.check("acme", 1.0, second)
        line.enter("acme", 1.0, second)
