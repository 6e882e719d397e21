"""Routing of compositions: replicas where all adapters are near, then those with some."""

import pytest

from lorikeet.protocol.messages import Work
from lorikeet.rendezvous import by_preference
from lorikeet.routing.ranking import RoutingRequest
from lorikeet_engine.adapter import Composition, Residency
from tests.routing.gateway import ASK, IDLE, MB, NAMES, OTHER, REF

BOTH = Composition((REF, OTHER), (0.5, 1.0))
ASK_BOTH = RoutingRequest(Work(prompt_tokens=500, rank=32, adapter_bytes=160 * MB), BOTH)
GPU, HOST, DISK = Residency.GPU, Residency.HOST, Residency.DISK


def cost_at(gateway, name, ask=ASK_BOTH):
    return next(c.cost for c in gateway.fleet.rank_replicas(ask) if c.replica == name)


def test_a_composition_goes_where_all_its_adapters_are_nearest(gateway):
    gateway.receive_all()
    gateway.receive("r0", moved={REF.digest: GPU})
    assert gateway.firsts(ASK_BOTH) == {"r0"}
    gateway.receive("r1", moved={REF.digest: DISK, OTHER.digest: GPU})
    assert gateway.firsts(ASK_BOTH) == {"r1"}
    gateway.receive("r2", moved={REF.digest: HOST, OTHER.digest: HOST})
    assert gateway.firsts(ASK_BOTH) == {"r2"}
    gateway.receive("r3", moved={REF.digest: GPU, OTHER.digest: GPU})
    assert gateway.firsts(ASK_BOTH) == {"r3"}


def test_a_composition_on_no_replica_goes_to_one_rendezvous_candidate(gateway):
    gateway.receive_all()
    assert gateway.firsts(ASK_BOTH) == {by_preference(BOTH.digest, NAMES)[0]}


def test_only_adapters_that_are_missing_are_loaded(gateway):
    gateway.fleet.set_replicas(("r0", "r1"))
    gateway.receive("r0", moved={REF.digest: HOST, OTHER.digest: HOST})
    gateway.receive("r1", moved={REF.digest: HOST, OTHER.digest: GPU})
    half = RoutingRequest(ASK_BOTH.work._replace(adapter_bytes=80 * MB), REF)
    assert cost_at(gateway, "r1").load_s == pytest.approx(cost_at(gateway, "r1", half).load_s)
    assert cost_at(gateway, "r0").load_s > cost_at(gateway, "r1").load_s


def test_each_adapter_of_a_waiting_composition_counts_as_loading(gateway):
    gateway.receive_all()
    sent = gateway.send("r2", ASK_BOTH)
    assert gateway.firsts(ASK_BOTH) == gateway.firsts(ASK) == {"r2"}
    gateway.fleet.on_ended(sent)
    assert gateway.firsts(ASK_BOTH) == {by_preference(BOTH.digest, NAMES)[0]}


def test_an_answer_shows_that_all_adapters_are_on_the_gpu(gateway):
    gateway.receive_all()
    gateway.fleet.on_first_bytes(gateway.send("r3", ASK_BOTH))
    for ask in (ASK, ASK_BOTH, RoutingRequest(ASK.work, OTHER)):
        assert gateway.firsts(ask) == {"r3"}


def test_the_tier_of_a_composition_moves_no_adapter_away(gateway):
    gateway.receive("r1", moved={REF.digest: GPU})
    gateway.fleet.on_adapter_found("r1", BOTH.digest, DISK)
    assert gateway.fleet._locations.tier("r1", REF.digest) is GPU
    assert gateway.fleet._locations._held["r1"].keys() == {REF.digest}
    gateway.fleet.on_adapter_found("r1", BOTH.digest, GPU)
    assert gateway.fleet._locations.tier("r1", OTHER.digest) is GPU


def test_adapters_of_compositions_that_wait_for_a_request_slot_are_prefetched(gateway):
    gateway.receive("r1", IDLE, moved={REF.digest: GPU})
    request_id = gateway.send("r1", ASK_BOTH)
    gateway.fleet.assign(request_id, "r1", ASK_BOTH)
    assert gateway.fleet.take_waiting_adapters() == {"r1": {OTHER: 1}}


def test_a_composition_whose_load_failed_prefers_replicas_that_have_all(gateway):
    gateway.receive_all()
    assert not gateway.fleet.on_adapter_failed(BOTH.digest)
    gateway.receive("r2", moved={REF.digest: DISK, OTHER.digest: HOST})
    assert gateway.fleet.on_adapter_failed(BOTH.digest)
    assert gateway.firsts(ASK_BOTH) == {"r2"}
