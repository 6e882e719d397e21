"""Routers of load programs, without Serve."""

import asyncio
from types import SimpleNamespace

import pytest

from loadtest.real_service.seeded_router import SeedsChooseReplicas
from lorikeet.protocol.messages import Call, EncodedCall, Endpoint
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.request import SamplingParams

NAMES = ("c", "a", "b")


@pytest.fixture
def choose():
    """Return the replica that a gateway's router chooses for an adapter and a seed."""

    def choose(adapter, seed, names=NAMES):
        router = object.__new__(SeedsChooseReplicas)
        router._name = "policy"
        router._ranked = lambda _listed, _pending: "by the costs"
        call = Call(
            "r",
            Endpoint.COMPLETIONS,
            0,
            "acme",
            "m",
            AdapterRef("acme", adapter, 1, "d"),
            sampling=SamplingParams(seed=seed),
        )
        replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
        pending = SimpleNamespace(
            args=(EncodedCall(call, ()),), kwargs={}, routing_context=SimpleNamespace()
        )
        ranks = asyncio.run(router.choose_replicas(replicas, pending))
        if ranks == "by the costs":
            return ranks
        ((replica,),) = ranks
        return replica.replica_id.unique_id

    return choose


def test_consecutive_seeds_reach_every_replica_from_any_gateway(choose):
    assert [choose("policy", seed) for seed in range(5, 8)] == ["c", "a", "b"]
    assert choose("policy", 6, names=("b", "a", "c")) == "a"  # another gateway's list


def test_other_adapters_are_routed_by_the_costs(choose):
    assert choose("other", 6) == "by the costs"
