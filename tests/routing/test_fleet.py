"""Fleet: knowledge of replicas from every source, and the ranking that follows."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest

from lorikeet.protocol.messages import Work
from lorikeet.protocol.status_update import PrefixRoom
from lorikeet.rendezvous import by_preference
from lorikeet.routing.fleet import Fleet
from lorikeet.routing.locations import prefix_hashes
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, MeasuredCosts, RowsTime, StepCosts
from lorikeet_engine.telemetry.status import EvictionCandidate
from tests.routing.gateway import ASK, BASE, BUSY, IDLE, MB, NAMES, OTHER, REF, Gateway


def test_a_request_goes_to_a_replica_with_its_adapter_at_the_nearest_tier(gateway):
    gateway.receive_all()
    for name, tier in zip(NAMES[1:], (Residency.DISK, Residency.HOST, Residency.GPU), strict=True):
        gateway.receive(name, moved={REF.digest: tier})
        assert gateway.firsts() == {name}


def test_gateways_with_equal_knowledge_spread_over_replicas():
    gateways = [Gateway(seed=seed) for seed in range(80)]
    for gateway in gateways:
        for name in NAMES:
            live = replace(IDLE, decoding=10 if name == "r0" else 11)
            gateway.receive(name, live, moved={REF.digest: Residency.GPU})
    sent = Counter(gateway.first() for gateway in gateways)
    assert sent.keys() == set(NAMES)
    assert sent.most_common(1)[0][1] < 60


def test_an_adapter_on_no_replica_goes_to_its_first_rendezvous_candidate(gateway):
    gateway.receive_all()
    assert gateway.firsts() == {by_preference(REF.digest, NAMES)[0]}


def test_a_ranking_has_existing_replicas_each_once(gateway):
    gateway.receive("r1", moved={REF.digest: Residency.GPU})
    for _ in range(20):
        order = gateway.order(ASK)
        assert len(order) == len(set(order)) >= 2
        assert set(order) <= set(NAMES)


def test_without_replicas_the_ranking_is_empty():
    assert Fleet().rank_replicas(ASK) == Fleet().rank_replicas(BASE) == []


def test_a_busy_replica_with_the_adapter_loses_and_an_idle_one_wins(gateway):
    gateway.receive_all()
    gateway.receive("r2", BUSY, moved={REF.digest: Residency.GPU})
    assert "r2" not in gateway.firsts()
    gateway.receive("r2", IDLE)
    assert gateway.firsts() == {"r2"}


def test_own_requests_count_at_once_and_until_a_status_includes_them(gateway):
    gateway.receive_all()
    sent = Counter()
    for _ in range(40):
        first = gateway.first(BASE)
        gateway.send(first, BASE)
        sent[first] += 1
    assert sorted(sent) == sorted(NAMES)
    assert max(sent.values()) <= 13  # ten each
    gateway.now_s += 1.0
    for name in NAMES:  # its update includes all of them
        gateway.receive(name, replace(IDLE, waiting=10, pending_tokens=5000))
    gateway.receive("r1", IDLE)
    gateway.fleet.set_replicas(("r1", "r2"))
    assert gateway.firsts(BASE) == {"r1"}


def test_only_the_part_of_other_tenants_queue_that_is_served_first_counts():
    gateway = Gateway(("r0", "r1"))
    gateway.receive_all()
    noisy, quiet = BASE._replace(tenant="noisy"), BASE._replace(tenant="quiet")
    for _ in range(20):
        gateway.send("r0", noisy)
    gateway.send("r1", quiet)
    gateway.send("r1", quiet)
    assert gateway.first(noisy) == "r1"
    assert gateway.first(quiet) == "r0"
    own = [gateway.send("r0", quiet) for _ in range(2)]
    (quiet_s,) = (c.cost.queue_s for c in gateway.fleet.rank_replicas(quiet) if c.replica == "r0")
    (noisy_s,) = (c.cost.queue_s for c in gateway.fleet.rank_replicas(noisy) if c.replica == "r0")
    assert quiet_s == pytest.approx(4 / 22 * noisy_s)  # two of its own, two of the other's 20
    for request_id in own:
        gateway.fleet.on_ended(request_id)
    assert gateway.first(quiet) == "r0"


def test_a_status_older_than_a_request_does_not_hide_the_request(gateway):
    gateway.receive_all()
    for _ in range(30):
        gateway.send("r0", BASE)
    gateway.receive("r0", IDLE)  # read before they came
    gateway.fleet.set_replicas(("r0", "r1"))
    assert gateway.firsts(BASE) == {"r1"}


def test_a_loading_adapter_attracts_the_next_request(gateway):
    gateway.receive_all()
    first = by_preference(REF.digest, NAMES)[0]
    other = next(name for name in NAMES if name != first)
    request_id = gateway.send(other)
    assert gateway.firsts() == {other}
    gateway.fleet.on_ended(request_id)  # failed: the adapter was never loaded
    assert gateway.firsts() == {first}


def test_an_answer_header_reports_the_tier_and_first_bytes_mean_the_gpu(gateway):
    gateway.receive_all()
    for name in ("r1", "r3"):
        gateway.receive(name, moved={REF.digest: Residency.GPU})
    gateway.fleet.on_adapter_found("r1", REF.digest, Residency.REMOTE)
    assert gateway.firsts() == {"r3"}
    gateway.fleet.on_adapter_found("r3", REF.digest, Residency.REMOTE)
    request_id = gateway.send("r2")
    gateway.fleet.on_first_bytes(request_id)
    gateway.fleet.on_ended(request_id)
    assert gateway.firsts() == {"r2"}


def test_own_streams_of_an_adapter_attract_its_requests(gateway):
    gateway.receive_all(replace(IDLE, decoding=100, ranks=160))
    for name in ("r0", "r2"):
        gateway.receive(
            name, replace(IDLE, decoding=100, ranks=160), moved={REF.digest: Residency.GPU}
        )
    request_id = gateway.send("r2")
    gateway.fleet.on_first_bytes(request_id)
    gateway.now_s += 1.0
    for name in NAMES:
        gateway.receive(name, replace(IDLE, decoding=100, ranks=160))
    assert gateway.firsts() == {"r2"}
    gateway.fleet.on_ended(request_id)
    assert gateway.firsts() == {"r0"}


def test_evicting_adapters_in_use_is_avoided(gateway):
    full = replace(IDLE, free_bytes=0)
    gateway.fleet.set_replicas(("r0", "r1"))
    gateway.receive(
        "r0",
        replace(full, victim=EvictionCandidate(80 * MB, 9.0)),
        moved={REF.digest: Residency.HOST},
    )
    gateway.receive(
        "r1",
        replace(full, victim=EvictionCandidate(80 * MB, 0.5)),
        moved={REF.digest: Residency.HOST},
    )
    assert gateway.firsts() == {"r1"}


def test_each_replica_is_ranked_by_its_own_measurements(gateway):
    slow = MeasuredCosts(StepCosts((RowsTime(1, 4e-3), RowsTime(2048, 2.0))), LoadCosts())
    gateway.fleet.set_replicas(("r1", "r2"))
    for _ in range(2):
        gateway.now_s += 1.0
        gateway.receive("r1", costs=slow)
        gateway.receive("r2", costs=MeasuredCosts())
    assert gateway.firsts(BASE) == {"r2"}


def test_similar_measurements_leave_adapters_at_their_rendezvous_candidates(gateway):
    for _ in range(2):
        gateway.now_s += 1.0
        for at, name in enumerate(NAMES):
            steps = StepCosts((RowsTime(1, 4e-3 + at * 1e-4), RowsTime(2048, 40e-3 + at * 2e-3)))
            gateway.receive(name, costs=MeasuredCosts(steps, LoadCosts()))
    for number in range(20):
        ref = replace(REF, digest=f"{number:064x}")
        assert gateway.firsts(ASK._replace(adapter=ref), 5) == {by_preference(ref.digest, NAMES)[0]}


def test_the_price_of_a_copy_scales_with_the_time_of_a_step(gateway):
    rows = (RowsTime(1, 0.1), RowsTime(256, 0.36), RowsTime(2048, 1.0))
    slow = MeasuredCosts(StepCosts(rows), LoadCosts())
    little = replace(IDLE, decoding=1, waiting=1, pending_tokens=500)
    for load in (IDLE, little):
        gateway.now_s += 1.0
        gateway.receive("r1", load, costs=slow, moved={REF.digest: Residency.GPU})
        for name in set(NAMES) - {"r1"}:
            gateway.receive(name, costs=slow)
    assert gateway.firsts() == {"r1"}


def test_a_snapshot_replaces_known_adapters_even_in_parts(gateway):
    gateway.receive_all()
    gateway.receive("r1", moved={REF.digest: Residency.GPU})
    gateway.receive("r3", moved={OTHER.digest: Residency.GPU})
    gateway.receive("r1", moved={"0" * 64: Residency.DISK}, begins_snapshot=True)
    assert gateway.firsts() == {"r1"}  # there may be more to come
    gateway.receive("r1", moved={OTHER.digest: Residency.GPU}, ends_snapshot=True)
    assert gateway.firsts() == {by_preference(REF.digest, NAMES)[0]}
    assert set(gateway.order(ASK._replace(adapter=OTHER))[:2]) == {"r1", "r3"}


def test_a_prompt_goes_to_the_replica_that_computed_its_prefix(gateway):
    gateway.receive_all()
    ask = BASE._replace(work=Work(4000), prefix_hashes=prefix_hashes(array("i", range(4000))))
    gateway.fleet.on_ended(gateway.send("r2", ask))
    assert gateway.firsts(ask) == {"r2"}
    gateway.receive("r2", BUSY)
    assert "r2" not in gateway.firsts(ask)


def test_a_replica_that_is_gone_adds_no_prefixes(gateway):
    gateway.receive("r2", prefix_room=PrefixRoom(0, 4000, 1000))
    hashes = prefix_hashes(array("i", range(4000)))
    ask = BASE._replace(work=Work(4000), prefix_hashes=hashes)
    gateway.fleet.on_begun("late")
    gateway.fleet.assign("late", "r2", ask)
    gateway.fleet.set_replicas(["r0"])
    gateway.fleet.on_accepted("late", "r2")
    assert gateway.fleet.accepted_by("late") == "r2"
    assert gateway.fleet._prefixes.host_tokens(hashes, "r2", 4000) == 0


@pytest.mark.parametrize("on_host", [True, False])
def test_a_prefix_that_left_the_gpu_counts_only_if_the_host_has_it(gateway, on_host):
    def ask(first):
        tokens = array("i", range(first, first + 4000))
        return BASE._replace(work=Work(4000), prefix_hashes=prefix_hashes(tokens))

    gateway.receive_all()
    gateway.receive("r2", prefix_room=PrefixRoom(4000, 4000 * on_host, 1000))
    for first in (0, 10_000):
        gateway.fleet.on_ended(gateway.send("r2", ask(first)))
    assert gateway.firsts(ask(10_000)) == {"r2"}
    assert (gateway.firsts(ask(0)) == {"r2"}) is on_host
