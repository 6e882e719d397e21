"""Requests in flight in a fleet: counts that return to zero, and routing decisions."""

from random import Random
from threading import Thread

from lorikeet.routing.ranking import H200_LLAMA_8B
from lorikeet.routing.tracked_replica import STALE_S, TrackedReplica
from lorikeet_engine.adapter import Residency
from tests.routing.gateway import ASK, BASE, NAMES, OTHER, REF, Gateway


def test_counts_return_to_zero(gateway):
    """Random outcomes of requests, in random order of events."""
    rng, open_ids = Random(3), []
    asks = [ASK, BASE, ASK._replace(adapter=OTHER), ASK._replace(prefix_hashes=(1, 2, 3))]
    for _ in range(4000):
        gateway.now_s += 0.01
        act = rng.randrange(6)
        if act < 2 or not open_ids:
            open_ids.append(gateway.send(rng.choice(NAMES), rng.choice(asks)))
            continue
        at = rng.randrange(len(open_ids))
        request_id = open_ids[at]
        if act == 2:
            gateway.fleet.on_first_bytes(request_id)
        elif act == 3:
            gateway.fleet.on_ended(request_id)
            del open_ids[at]
        elif act == 4:
            gateway.fleet.on_accepted(request_id, rng.choice(NAMES))
        else:
            gateway.receive(rng.choice(NAMES), begins_snapshot=True, ends_snapshot=True)
    for request_id in open_ids:
        gateway.fleet.on_ended(request_id)
    gateway.now_s += STALE_S + 1  # own counts alone
    fresh = TrackedReplica("fresh", H200_LLAMA_8B).status(gateway.now_s, None)
    for name in NAMES:
        known = gateway.fleet._replicas[name]
        assert known.status(gateway.now_s, None) == fresh
        assert not known.decoding
    assert not gateway.fleet._in_flight
    assert not gateway.fleet._locations.loading_on(REF.digest)


def test_a_request_that_is_not_tracked_leaves_no_trace(gateway):
    """The router may still be choosing after the client has gone."""
    gateway.fleet.on_begun("gone")
    gateway.fleet.on_ended("gone")
    gateway.fleet.assign("gone", "r0", ASK)
    gateway.fleet.on_accepted("gone", "r0")
    gateway.fleet.on_first_bytes("gone")
    assert gateway.fleet.accepted_by("gone") is None
    assert not gateway.fleet._in_flight


def test_accepted_by_is_the_accepting_replica_not_the_assigned_one(gateway):
    gateway.fleet.on_begun("a")
    gateway.fleet.assign("a", "r0", ASK)
    assert gateway.fleet.accepted_by("a") is None
    gateway.fleet.on_accepted("a", "r2")
    assert gateway.fleet.accepted_by("a") == "r2"


def test_only_the_first_report_of_acceptance_counts(gateway):
    request_id = gateway.send("r1")
    taken = gateway.fleet.decision(request_id)
    gateway.now_s += 1
    gateway.fleet.on_accepted(request_id, "r1")
    assert gateway.fleet.decision(request_id) == taken


def test_a_removed_replica_has_requests_in_flight_until_they_end(gateway):
    request_id = gateway.send("r1")
    gateway.fleet.set_replicas(["r0"])
    assert gateway.fleet.has_in_flight("r1")
    assert not gateway.fleet.has_in_flight("r0")
    gateway.fleet.on_ended(request_id)
    assert not gateway.fleet.has_in_flight("r1")


def test_adapters_of_requests_that_wait_for_a_slot_are_listed(gateway):
    gateway.receive_all()
    gateway.receive("r3", moved={OTHER.digest: Residency.GPU})
    gateway.fleet.on_begun("a")
    gateway.fleet.assign("a", "r1", ASK)
    assert gateway.fleet.take_waiting_adapters() == {}
    gateway.fleet.on_begun("b")
    gateway.fleet.on_begun("c")
    for _ in range(4):
        gateway.fleet.assign("a", "r1", ASK)
        gateway.fleet.assign("b", "r1", ASK)
        gateway.fleet.assign("c", "r3", ASK._replace(adapter=OTHER))
    assert gateway.fleet.take_waiting_adapters() == {"r1": {REF: 2}}
    assert gateway.fleet.take_waiting_adapters() == {}


def test_counts_are_correct_with_two_threads():
    gateway = Gateway()

    def route(number):
        for turn in range(2000):
            request_id = f"{number} {turn}"
            gateway.fleet.on_begun(request_id)
            gateway.fleet.assign(request_id, gateway.order(ASK)[0], ASK)
            gateway.fleet.on_first_bytes(request_id)
            gateway.fleet.on_ended(request_id)

    threads = [Thread(target=route, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loads = [gateway.fleet._replicas[name].status(gateway.now_s, None) for name in NAMES]
    assert all(not one.running and not one.waiting and not one.waiting_tokens for one in loads)


def test_a_decision_keeps_its_candidates_until_the_request_ends(gateway):
    gateway.receive_all()
    gateway.receive("r2", moved={REF.digest: Residency.HOST})
    candidates = gateway.fleet.rank_replicas(ASK)
    assert candidates[0].replica == "r2"
    assert candidates[0].tier is Residency.HOST
    totals = [each.cost.total_s for each in candidates]
    assert totals == sorted(totals)
    gateway.fleet.on_begun("a")
    assert gateway.fleet.decision("a") is None
    gateway.fleet.assign("a", "r2", ASK, candidates)
    assert gateway.fleet.decision("a") == ("r2", None, tuple(candidates))
    gateway.now_s += 1.5
    gateway.fleet.on_accepted("a", "r1")  # which had room
    assert gateway.fleet.decision("a") == ("r1", gateway.now_s, tuple(candidates))
    gateway.fleet.on_ended("a")
    assert gateway.fleet.decision("a") is None
