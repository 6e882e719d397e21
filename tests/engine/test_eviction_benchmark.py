"""The simulations of docs/eviction.md, smaller: what is the default must earn it."""

import sys

import numpy as np
import pytest

from engine.benchmarks import adapter_traffic, eviction, fragmentation
from engine.benchmarks.adapter_traffic import Requests, Simulation, Traffic
from engine.benchmarks.eviction import measure
from lorikeet_engine.popularity import Zipf

ONES = np.ones(5)  # seconds


def small(exponent: float, **changes) -> Traffic:
    sizes = {"adapters": 500, "rate_per_s": 6.0, "duration_s": 500.0, **changes}
    return Traffic(f"zipf {exponent}", Zipf(exponent), **sizes)


def loads_and_bytes(traffic: Traffic, policy: str) -> float:
    """The product of the two that a policy should keep low, as a share of LRU's."""
    row, lru = measure(traffic, policy), measure(traffic, "LRU")
    return row.misses * row.loaded_gb / (lru.misses * lru.loaded_gb)


@pytest.mark.parametrize(
    ("traffic", "most"),
    [
        (small(0.0), 1.0),
        (small(0.8), 0.85),
        (small(1.0), 0.85),
        (small(1.2), 0.9),
        (small(1.5), 1.05),
        (small(1.0, noisy=True), 0.9),
        (small(1.0, cv=4.0), 0.9),
    ],
    ids=lambda value: value.name if isinstance(value, Traffic) else None,
)
def test_the_default_misses_and_loads_less_than_lru_or_hardly_more(traffic, most):
    assert loads_and_bytes(traffic, "uses / √size") < most


def test_who_knows_the_future_does_better_than_anybody():
    traffic = small(1.0)
    rows = {policy: measure(traffic, policy) for policy in eviction.POLICIES}
    assert min(rows.values(), key=lambda row: row.misses).policy == "Belady"
    assert len({row.requests for row in rows.values()}) == 1


def test_requests_wait_for_the_links_that_their_adapter_comes_over(monkeypatch):
    monkeypatch.setattr(adapter_traffic, "HOST_SHARE", 1.0)
    requests = Requests(np.array([0.0, 5.0, 10.0, 15.0, 15.0]), np.array([3, 3, 2, 3, 2]), ONES)
    monkeypatch.setattr(Traffic, "requests", lambda _: requests)
    # Ranks 8, 16, 32 and 64: beside the last there is room for the first alone.
    simulation = Simulation(small(1.0, adapters=4, room=0.6), eviction.POLICIES["LRU"])
    simulation.run()
    near_s, far_s = (5.243e6 * 64 / speed for speed in (55e9, 5e9))
    waits_s = [near_s + far_s, 0.0, (near_s + far_s) / 2, near_s, 1.0 + near_s + near_s / 2]
    assert simulation.waits_s == pytest.approx(waits_s, rel=1e-3)
    assert simulation.missed == [0, 2, 3, 4]


def test_the_table_has_a_line_for_each_traffic_and_a_column_for_each_policy(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(eviction, "TRAFFIC", (small(1.5, duration_s=130.0),))
    monkeypatch.setattr(sys, "argv", ["eviction", "--json", str(tmp_path / "out.json")])
    eviction.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "| adapters, traffic | LRU | Chameleon | uses | uses / size | uses / √size | Belady |"
    )
    assert lines[2].startswith("| zipf 1.5 |")
    assert lines[2].count("GB") == 6


def test_nothing_moves_in_an_arena_of_many_sizes_and_little_of_it_is_empty():
    (*_, full) = fragmentation.measure(fragmentation.MIXES[1], fragmentation.Ours, loads=600)
    assert full.moved == 0.0
    assert full.used > 0.95
