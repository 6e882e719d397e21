"""Replicas that are lost, gone or silent, or cannot load an adapter."""

from collections import Counter

from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.rendezvous import by_preference
from lorikeet.routing.fleet import LOST_S, RECENT_S, SILENT_S
from lorikeet.routing.tracked_replica import FETCH_PAUSE_S, STALE_S
from lorikeet_engine.adapter import Residency
from tests.routing.gateway import ASK, BASE, BUSY, IDLE, NAMES, OTHER, REF


def test_a_lost_replica_is_not_ranked_until_its_next_status(gateway):
    gateway.receive_all()
    gateway.receive("r1", moved={REF.digest: Residency.GPU})
    gateway.fleet.on_replica_lost("r1")
    for _ in range(40):
        assert "r1" not in gateway.order(ASK)
        assert "r1" not in gateway.order(BASE)
    gateway.receive("r1")
    assert gateway.firsts() == {"r1"}


def test_a_lost_replica_without_status_is_ranked_again_after_lost_s(gateway):
    gateway.fleet.on_replica_lost("r1")
    gateway.now_s += LOST_S - 0.1
    assert "r1" not in {name for _ in range(40) for name in gateway.order(BASE)}
    gateway.now_s += 0.1
    assert "r1" in {name for _ in range(40) for name in gateway.order(BASE)}


def test_an_old_status_does_not_bring_a_lost_replica_back(gateway):
    old = StatusUpdate(5, IDLE)
    gateway.fleet.on_status_update("r1", old)
    gateway.fleet.on_replica_lost("r1")
    gateway.fleet.on_status_update("r1", old)
    assert "r1" not in {name for _ in range(40) for name in gateway.order(BASE)}


def test_a_silent_replica_is_lost_and_its_requests_are_returned(gateway):
    gateway.receive_all()
    waiting, begun, elsewhere = gateway.send("r1"), gateway.send("r1"), gateway.send("r2")
    gateway.fleet.on_first_bytes(begun)
    gateway.now_s += SILENT_S - 0.1
    for name in ("r0", "r2", "r3"):
        gateway.receive(name)
    assert gateway.fleet.take_silent() == {}
    gateway.now_s += 0.1
    assert gateway.fleet.take_silent() == {"r1": [waiting, begun]}
    assert "r1" not in {name for _ in range(40) for name in gateway.order(BASE)}
    gateway.receive("r1")
    assert gateway.fleet.take_silent() == {}
    assert "r1" in {name for _ in range(40) for name in gateway.order(BASE)}
    assert gateway.fleet.decision(elsewhere).replica == "r2"


def test_no_replica_is_silent_while_this_gateway_receives_no_status_at_all(gateway):
    gateway.receive_all()
    gateway.send("r1")
    gateway.now_s += 10 * SILENT_S
    assert gateway.fleet.take_silent() == {}


def test_time_in_which_all_replicas_were_silent_does_not_count(gateway):
    gateway.receive_all()
    gateway.send("r1")
    gateway.now_s += 10 * SILENT_S
    assert gateway.fleet.take_silent() == {}
    gateway.receive("r0")
    assert gateway.fleet.take_silent() == {}
    gateway.now_s += SILENT_S - 0.1
    gateway.receive("r0")
    assert gateway.fleet.take_silent() == {}
    gateway.now_s += 0.1
    assert gateway.fleet.take_silent().keys() == {"r1", "r2", "r3"}
    gateway.now_s += RECENT_S + 0.1
    assert gateway.fleet.take_silent() == {}


def test_a_replica_that_has_sent_no_status_yet_is_not_silent(gateway):
    gateway.receive("r0")
    gateway.send("r1")
    gateway.now_s += SILENT_S
    gateway.receive("r0")
    assert gateway.fleet.take_silent() == {}


def test_while_fetches_are_paused_a_busy_replica_with_the_adapter_wins(gateway):
    gateway.receive_all()
    gateway.receive("r1", BUSY, moved={REF.digest: Residency.HOST})
    assert "r1" not in gateway.firsts()
    assert not gateway.fleet.on_load_failed(OTHER.digest)
    assert gateway.fleet.on_load_failed(REF.digest)
    assert gateway.firsts() == {"r1"}
    gateway.now_s += FETCH_PAUSE_S
    gateway.receive_all()
    gateway.receive("r1", BUSY)
    assert "r1" not in gateway.firsts()


def test_one_adapter_that_fails_to_load_does_not_divert_others(gateway):
    gateway.receive_all()
    gateway.receive("r1", BUSY, moved={REF.digest: Residency.HOST})
    for _ in range(3):
        assert not gateway.fleet.on_load_failed(OTHER.digest)
    assert "r1" not in gateway.firsts()
    assert gateway.fleet.on_load_failed(REF.digest)
    assert gateway.firsts() == {"r1"}


def test_an_adapter_that_fails_to_load_goes_to_a_replica_that_has_it(gateway):
    gateway.receive_all()
    gateway.receive("r1", BUSY, moved={REF.digest: Residency.HOST})
    assert gateway.fleet.on_adapter_failed(REF.digest)
    assert gateway.firsts() == {"r1"}
    gateway.now_s += FETCH_PAUSE_S
    gateway.receive_all()
    gateway.receive("r1", BUSY)
    assert "r1" not in gateway.firsts()


def test_many_adapters_with_lost_or_damaged_blobs_do_not_divert_others(gateway):
    gateway.receive_all()
    gateway.receive("r1", BUSY, moved={REF.digest: Residency.HOST})
    for digit in "0123456789":
        assert not gateway.fleet.on_adapter_failed(digit * 64)
    assert "r1" not in gateway.firsts()


def test_a_full_disk_only_diverts_adapters_that_its_replica_lacks(gateway):
    gateway.receive_all()
    full = gateway.first()
    gateway.receive(full, moved={OTHER.digest: Residency.HOST})
    assert gateway.fleet.on_load_failed(REF.digest, full)
    assert gateway.order(ASK)[-1] == full
    assert gateway.first(ASK._replace(adapter=OTHER)) == full
    for name in NAMES[:-1]:
        assert gateway.fleet.on_load_failed(REF.digest, name)
    assert not gateway.fleet.on_load_failed(REF.digest, NAMES[-1])
    gateway.now_s += FETCH_PAUSE_S
    gateway.receive_all()
    assert gateway.first() == full


def test_a_full_disk_of_a_removed_replica_pauses_no_fetches(gateway):
    gateway.receive_all()
    full, *others = NAMES
    gateway.fleet.set_replicas(others)
    assert gateway.fleet.on_load_failed(REF.digest, full)


def test_when_all_replicas_are_lost_all_are_ranked(gateway):
    for name in NAMES:
        gateway.fleet.on_replica_lost(name)
    assert {name for _ in range(40) for name in gateway.order(ASK)} == set(NAMES)


def test_a_lost_replicas_adapters_go_to_the_next_candidate(gateway):
    first, second, *_ = by_preference(REF.digest, NAMES)
    gateway.fleet.on_replica_lost(first)
    assert gateway.first() == second


def test_a_replica_that_is_gone_is_forgotten(gateway):
    gateway.receive_all()
    gateway.receive("r1", moved={REF.digest: Residency.GPU})
    request_id = gateway.send("r1")
    gateway.fleet.set_replicas(("r0", "r2"))
    assert gateway.firsts() <= {"r0", "r2"}
    gateway.fleet.on_first_bytes(request_id)
    gateway.fleet.on_ended(request_id)
    gateway.receive("r1", moved={REF.digest: Residency.GPU})
    assert gateway.firsts() <= {"r0", "r2"}
    gateway.fleet.set_replicas(NAMES)  # one of that name begins anew
    gateway.receive_all()
    assert gateway.firsts() == {by_preference(REF.digest, NAMES)[0]}


def test_without_any_status_own_requests_and_serves_queue_lengths_decide(gateway):
    queues = {"r0": 90, "r1": 60, "r2": 3, "r3": 70}
    for _ in range(20):
        order = gateway.order(BASE, queues.get)
        assert order == sorted(order, key=queues.__getitem__)
    sent = Counter()
    for _ in range(20):
        sent[first := gateway.first(BASE)] += 1
        gateway.send(first, BASE)
    assert all(3 <= sent[name] <= 7 for name in NAMES)


def test_a_replica_without_recent_status_is_ranked_by_own_requests(gateway):
    gateway.receive_all()
    gateway.receive("r0", BUSY)
    gateway.fleet.set_replicas(("r0", "r1"))
    assert gateway.firsts(BASE) == {"r1"}
    gateway.now_s += STALE_S + 1
    for _ in range(5):
        gateway.send("r1", BASE)
    assert gateway.firsts(BASE) == {"r0"}
