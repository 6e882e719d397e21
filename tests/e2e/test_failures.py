"""Death of parts under load: engines, replicas, controllers and the gateway."""

import os
import signal
import time

import httpx
import pytest
import ray

from tests.e2e.load import Load, Outcome, hit_rate
from tests.e2e.service_processes import actor_named, actors_named, complete, engine_processes
from tests.waiting import eventually

ADAPTERS = 12
WINDOW = 60  # answers over which a hit rate is measured
BACK_S = 30.0  # time for the hit rate to recover


@pytest.fixture(scope="module")
def adapters(crowd):
    return crowd.adapters(ADAPTERS)


@pytest.fixture
def load(service, crowd, adapters):
    """Load, not yet started, on the base model and on adapters that are already resident."""
    assert complete(service)
    with Load(service.url, adapters) as warm:
        warm.wait_for(2 * ADAPTERS)
    return Load(service.url, [*adapters, crowd.base()])


@pytest.mark.parametrize("part", ["replica", pytest.param("engine", marks=pytest.mark.soak)])
@pytest.mark.parametrize("seconds", [0, pytest.param(BACK_S, marks=pytest.mark.soak)])
def test_a_killed_replica_loses_no_stream_and_the_hit_rate_recovers(service, load, part, seconds):
    engine, replica = next(iter(engine_processes(service).items()))
    with load:
        load.wait_for(WINDOW)
        before = hit_rate(load.results[-WINDOW:])
        killed_s = time.monotonic()
        os.kill(engine if part == "engine" else replica, signal.SIGKILL)
        time.sleep(seconds)
        load.wait_for(WINDOW)
        while hit_rate(load.sent(killed_s)[-WINDOW:]) < 0.95 * before:
            assert time.monotonic() < killed_s + max(seconds, BACK_S)
            time.sleep(0.2)
    assert load.unfinished() == []


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.soak)])
def test_every_request_is_answered_while_our_controller_and_serves_are_dead(service, load, seconds):
    with load:
        load.wait_for(WINDOW)
        killed_s = time.monotonic()
        for controller in ("SERVE_CONTROLLER_ACTOR", "default#controller#"):
            ray.kill(actor_named(controller), no_restart=False)
        time.sleep(seconds)
    assert load.unfinished() == []
    assert hit_rate(load.sent(killed_s)) > 0.9
    assert eventually(lambda: actors_named("default#controller#"), within_s=30)


def test_a_killed_gateway_is_replaced_and_replicas_drop_its_requests(service, load):
    load.streams, load.tokens = 16, 800
    with load:
        assert eventually(lambda: sum(r["running"] for r in service.replicas()) > 8, within_s=20)
        load.send_no_more()
        ray.kill(actor_named("#gateway#"), no_restart=False)
    assert {Outcome.CUT} <= load.counts().keys() <= {Outcome.CUT, Outcome.REFUSED}
    assert eventually(lambda: has_gateway(service), within_s=60)
    replicas = service.replicas()
    assert {r["replica"] for r in replicas} >= {r.replica for r in load.results if r.replica}
    assert eventually(lambda: all(map(idle, service.replicas())), within_s=3)


def has_gateway(service):
    try:
        return service.admin("GET", "/status").is_success
    except httpx.TransportError:  # the gateway may end during our connection
        return False


def idle(replica):
    leases = sum(adapter["leases"] for adapter in replica["adapters"])
    return replica["running"] + replica["waiting"] + replica["kv_pages_used"] + leases == 0


def test_requests_that_have_not_begun_leave_a_replica_that_is_stopped(service, load):
    replica = next(iter(engine_processes(service).values()))
    with load:
        load.wait_for(WINDOW)
        os.kill(replica, signal.SIGSTOP)
        stopped_s = time.monotonic()
        time.sleep(15)
        os.kill(replica, signal.SIGCONT)
        load.wait_for(WINDOW)
    assert load.unfinished() == []
    sent = load.sent(stopped_s)
    assert len(sent) > WINDOW
    assert [r for r in sent if r.begun_s - r.sent_s > 10] == []


@pytest.mark.soak
def test_other_replicas_answer_requests_while_an_engine_hangs(service, load):
    engine, _ = next(iter(engine_processes(service).items()))
    with load:
        load.wait_for(WINDOW)
        hung_s = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        time.sleep(20)
        os.kill(engine, signal.SIGCONT)
        load.wait_for(WINDOW)
    assert load.unfinished() == []
    late = [r for r in load.sent(hung_s + 1) if r.begun_s - r.sent_s > 10]
    assert late == []
