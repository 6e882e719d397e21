"""Demand for adapters: uses of all replicas, added up, with the engines' decay."""

import pytest

from lorikeet.placement import demand as demand_module
from lorikeet.placement.demand import HALF_LIFE_S, Demand
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency import eviction_score
from tests.placement.builders import held, ref, report


def used(replica: str, image_bytes: int | None = None, **uses: float) -> ReplicaReport:
    adapters = (held(ref(name), Residency.DISK, image_bytes, count) for name, count in uses.items())
    return report(replica, adapters=tuple(adapters))


def uses_of(demand: Demand) -> dict[str, float]:
    return {each.ref.name: each.uses for each in demand.adapters.values()}


def test_uses_halve_as_in_the_engines():
    assert HALF_LIFE_S == eviction_score.HALF_LIFE_S


def test_uses_of_all_replicas_are_added():
    demand = Demand()
    demand.observe([used("p", a=1.0, b=2.0), used("q", b=3.0)], 0.0)
    assert uses_of(demand) == {"a": 1.0, "b": 5.0}


def test_demand_follows_the_replicas_counts():
    demand = Demand()
    for now_s, count in ((0.0, 4.0), (HALF_LIFE_S, 2.0), (HALF_LIFE_S + 1, 7.0)):
        demand.observe([used("p", a=count)], now_s)
        assert uses_of(demand) == {"a": count}


def test_uses_of_a_lost_replica_decay():
    demand = Demand()
    demand.observe([used("p", a=8.0, image_bytes=7), used("q", b=1.0)], 0.0)
    demand.observe([used("q", a=1.0, b=1.0)], 2 * HALF_LIFE_S)
    assert uses_of(demand) == pytest.approx({"a": 2.0, "b": 1.0})
    assert demand.adapters[ref("a").digest].image_bytes == 7
    demand.observe([], 20 * HALF_LIFE_S)
    assert demand.adapters == {}


def test_only_the_most_used_adapters_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demand_module, "_MOST_ADAPTERS", 3)
    demand = Demand()
    demand.observe([used("p", **{f"a{n}": n + 1.0 for n in range(10)})], 0.0)
    assert uses_of(demand) == {"a9": 10.0, "a8": 9.0, "a7": 8.0}
