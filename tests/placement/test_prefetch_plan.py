"""Plan of prefetches: follows demand, fills free space, and comes to rest."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.placement import prefetch_plan
from lorikeet.placement.prefetch_plan import Prefetch, ReplicaView, plan_prefetches, sole_copies
from lorikeet.rendezvous import by_preference
from lorikeet_engine.adapter import Residency
from tests.placement.made_up_fleet import DISK, GPU, HOST, evictable, perform, replica, settle
from tests.processor_time import in_time


class Ones(dict[str, int]):
    """Adapters of one byte each."""

    def __missing__(self, _digest: str) -> int:
        return 1

    def __contains__(self, _digest: object) -> bool:
        return True

    def get(self, digest: str, _default: int = 0) -> int:  # type: ignore[override]
        return self[digest]


ONES = Ones()


def many(count: int, uses: float = 1.0) -> dict[str, float]:
    return {f"a{n:03}": uses + (count - n) / 1000 for n in range(count)}


def holders(replicas: dict[str, ReplicaView], digest: str, tier: Residency = GPU) -> set[str]:
    return {name for name, one in replicas.items() if one.held.get(digest, DISK) >= tier}


def test_an_adapter_in_use_that_is_nowhere_comes_to_its_first_rendezvous_candidate():
    replicas = {name: replica(5) for name in "pqr"}
    first = by_preference("a", "pqr")[0]
    assert plan_prefetches({"a": 1.0}, ONES, replicas) == {first: [Prefetch("a", GPU, 1.0)]}


def test_a_replica_that_holds_the_adapter_nearer_is_preferred():
    first, *others = by_preference("a", "pqr")
    replicas = {first: replica(5), **{name: replica(5) for name in others}}
    for tier in (DISK, HOST):
        replicas[others[1]] = replace(replicas[others[1]], held={"a": tier})
        assert list(plan_prefetches({"a": 1.0}, ONES, replicas)) == [others[1]]


def test_adapters_hardly_used_or_of_unknown_size_are_not_moved():
    replicas = {"p": replica(5, host=5)}
    assert plan_prefetches({"a": 0.4}, ONES, replicas) == {}
    assert plan_prefetches({"a": 9.0}, {}, replicas) == {}


def test_a_new_replica_gets_the_most_used_adapters_that_fit_nowhere_else():
    demand = many(40)
    replicas = {
        "p": replica(10, *list(demand)[:10]),
        "q": replica(10, *list(demand)[10:20]),
        "new": replica(10),
    }
    settled, given = settle(demand, ONES, replicas)
    assert len(given) == 10
    assert settled["new"].held == dict.fromkeys(list(demand)[20:30], GPU)


def test_a_new_replica_takes_its_share_of_the_hottest_adapters():
    demand = many(10, uses=100.0)
    replicas = {
        "p": replica(10, *list(demand)[:5]),
        "q": replica(10, *list(demand)[5:]),
        "new": replica(10),
    }
    settled, given = settle(demand, ONES, replicas)
    assert settled["p"] == replicas["p"]
    assert settled["q"] == replicas["q"]
    load = sum(demand[d] / len(holders(settled, d)) for d in settled["new"].held)
    assert 0.8 < load / (sum(demand.values()) / 3) < 1.3
    assert len(given) < 10


def test_adapters_of_a_dead_replica_evict_adapters_used_half_as_much():
    demand = {"cold": 1.0, "cool": 2.0, "x": 3.0, "y": 3.0, "lost": 4.0}
    replicas = {"p": replica(2, "cold", "cool"), "q": replica(2, "x", "y")}
    settled, given = settle(demand, ONES, replicas)
    assert settled["p"].held == {"cold": DISK, "cool": GPU, "lost": GPU}
    assert len(given) == 1


def test_two_equally_used_adapters_do_not_swap():
    replicas = {"p": replica(1, "a")}
    assert plan_prefetches({"a": 3.0, "b": 5.0}, ONES, replicas) == {}
    assert plan_prefetches({"a": 2.0, "b": 5.0}, ONES, replicas) != {}


def test_the_more_load_on_an_adapter_the_more_copies_it_has():
    others = many(64)
    for hot, copies in ((5.0, [1]), (20.0, [2]), (60.0, [5, 6, 7]), (1000.0, [8])):
        replicas = {f"r{n}": replica(20) for n in range(8)}
        settled, _ = settle(others | {"hot": hot}, ONES, replicas)
        assert len(holders(settled, "hot")) in copies
        assert all(len(holders(settled, each)) == 1 for each in others)


def test_fragments_of_a_full_arena_are_not_filled():
    demand = many(20)
    full = {"p": replica(20, *list(demand)[:19])}
    assert plan_prefetches(demand, ONES, full) == {}
    assert len(plan_prefetches(demand, ONES, {"p": replica(20, *list(demand)[:18])})["p"]) == 2


def test_a_single_request_does_not_copy_an_adapter_everywhere():
    _, given = settle({"a": 3.0}, ONES, {f"r{n}": replica(20, host=20) for n in range(8)})
    assert len(given) == 1


def test_copies_go_to_the_next_in_the_adapters_order():
    demand = many(32) | {"hot": 17.0}
    names = [f"r{n}" for n in range(4)]
    settled, _ = settle(demand, ONES, {name: replica(20) for name in names})
    assert holders(settled, "hot") == set(by_preference("hot", names)[:2])


def test_an_adapter_that_fits_on_no_gpu_comes_to_a_host():
    replicas = {
        "p": replica(1, "a", host=2),
        "q": replica(1, "b", host=2),
    }  # a and b have copies there
    prefetches = plan_prefetches({"a": 5.0, "b": 5.0, "c": 4.0, "d": 3.0, "e": 2.0}, ONES, replicas)
    assert sorted(each for some in prefetches.values() for each in some) == [
        Prefetch("c", HOST, 4.0),
        Prefetch("d", HOST, 3.0),
    ]


def test_with_spares_every_adapter_in_use_is_on_two_replicas():
    demand = many(6)
    replicas = {
        "p": replica(3, *list(demand)[:3], host=9),
        "q": replica(3, *list(demand)[3:], host=9),
    }
    assert sole_copies(demand, replicas) == {"p": 0.5, "q": 0.5}
    assert plan_prefetches(demand, ONES, replicas) == {}
    settled, given = settle(demand, ONES, replicas, spares=True)
    assert len(given) == 6
    assert sole_copies(demand, settled) == {"p": 0, "q": 0}


def test_spares_evict_unused_adapters():
    demand = many(4)
    unused = tuple(f"old{n}" for n in range(4))
    replicas = {
        "p": replica(2, *list(demand)[:2], host=6, on_host=unused),
        "q": replica(2, *list(demand)[2:], host=6, on_host=unused),
    }
    settled, given = settle(demand, ONES, replicas, spares=True)
    assert len(given) == 4
    assert sole_copies(demand, settled) == {"p": 0, "q": 0}


def test_a_sole_copy_is_used_and_only_there_on_gpu_or_host():
    replicas = {
        "p": ReplicaView(9, 9, {"a": GPU, "b": HOST, "c": DISK, "both": GPU, "unused": GPU}),
        "q": ReplicaView(9, 9, {"both": HOST, "a": DISK}),
    }
    assert sole_copies(dict.fromkeys(["a", "b", "c", "both"], 1.0), replicas) == {
        "p": 0.667,
        "q": 0,
    }
    assert sole_copies({}, replicas) == {"p": 0, "q": 0}


def test_pinned_adapters_count_as_held_and_are_never_evicted():
    kept = {"pinned": GPU, "host-pinned": HOST}
    held = {"pinned": GPU, "host-pinned": HOST, "a": GPU}
    replicas = {"p": ReplicaView(1, 0, held, {"a": 1.0}, kept)}
    demand = {"pinned": 1.0, "host-pinned": 1.0, "a": 1.0, "b": 100.0}
    assert plan_prefetches(demand, ONES, replicas) == {"p": [Prefetch("b", GPU, 100.0)]}
    assert perform(replicas["p"], [Prefetch("b", GPU, 100.0)], ONES).held["a"] is DISK
    promised = {"p": ReplicaView(9, 9, {}, {}, {"pinned": GPU})}
    assert plan_prefetches({"pinned": 1.0}, ONES, promised) == {}


def test_prefetches_of_one_plan_are_bounded():
    demand = many(100)
    prefetches = plan_prefetches(demand, ONES, {"p": replica(100)})["p"]
    assert [each.digest for each in prefetches] == list(demand)[: prefetch_plan.MOST_PREFETCHES]
    large = dict.fromkeys(demand, prefetch_plan.MOST_BYTES // 3)
    assert len(plan_prefetches(demand, large, {"p": replica(10**12)})["p"]) == 3
    huge = dict.fromkeys(demand, prefetch_plan.MOST_BYTES * 2)
    assert len(plan_prefetches(demand, huge, {"p": replica(10**12)})["p"]) == 1


names = st.sampled_from([f"a{n}" for n in range(12)])
tiers = st.sampled_from([DISK, HOST, GPU])


@st.composite
def fleets(draw: st.DrawFn):
    sizes = draw(st.fixed_dictionaries({f"a{n}": st.integers(1, 40) for n in range(12)}))
    demand = draw(st.dictionaries(names, st.floats(0, 60), max_size=12))
    replicas = {}
    for name in [f"r{n}" for n in range(draw(st.integers(1, 4)))]:
        held = draw(st.dictionaries(names, tiers))
        kept = draw(st.dictionaries(names, tiers, max_size=2))
        uses = draw(st.dictionaries(names, st.floats(0, 20)))
        bare = ReplicaView(0, 0, held, uses, kept)
        rooms = [
            sum(sizes[d] for d in evictable(bare, tier, sizes)) + draw(st.integers(0, 60))
            for tier in (GPU, HOST)
        ]
        replicas[name] = replace(bare, gpu_bytes=rooms[0], host_bytes=rooms[1])
    return demand, sizes, replicas


@settings(deadline=None)
@given(fleets(), st.booleans())
def test_prefetches_never_exceed_a_tier_nor_evict_a_pin(fleet, spares: bool):
    demand, sizes, replicas = fleet
    prefetches = plan_prefetches(demand, sizes, replicas, spares=spares)
    assert prefetches == plan_prefetches(
        dict(reversed(demand.items())), sizes, dict(reversed(replicas.items())), spares=spares
    )
    for name, some in prefetches.items():
        before, after = replicas[name], perform(replicas[name], some, sizes)
        assert len(some) == len(set(some)) <= prefetch_plan.MOST_PREFETCHES
        for digest, tier in before.pinned.items():
            assert after.held.get(digest, DISK) >= min(tier, before.held.get(digest, DISK))
        for each in some:
            assert each.tier > max(
                before.held.get(each.digest, DISK), before.pinned.get(each.digest, DISK)
            )


@settings(deadline=None)
@given(fleets(), st.booleans())
def test_plans_converge_to_no_prefetches(fleet, spares: bool):
    settle(*fleet, spares=spares)


@settings(deadline=None)
@given(fleets())
def test_prefetches_to_gpus_raise_the_uses_that_copies_draw(fleet):
    demand, sizes, replicas = fleet
    settled, given = settle(demand, sizes, replicas)
    before, after = (sum(worth(demand, fleet)) for fleet in (replicas, settled))
    assert after > before if any(o.tier is GPU for o in given) else after == before


def worth(demand: dict[str, float], replicas: dict[str, ReplicaView]) -> Iterator[float]:
    """Yield the uses that each copy on a GPU draws: an adapter's first all, the second half, …"""
    for digest, uses in demand.items():
        yield from (uses / (n + 1) for n in range(len(holders(replicas, digest))))


def test_64_replicas_and_10_000_adapters_take_well_under_a_second():
    rng = random.Random(1)
    demand = {f"a{n}": 3000 / (n + 1) for n in range(10_000)}
    sizes = dict.fromkeys(demand, 84 * 10**6)
    replicas = {}
    for n in range(64):
        held = dict.fromkeys(demand, DISK) | dict.fromkeys(rng.sample(list(demand), 300), HOST)
        held |= dict.fromkeys(rng.sample(list(demand)[:4000], 50), GPU)
        room = 84 * 10**6
        replicas[f"r{n}"] = ReplicaView(
            50 * room, 300 * room, held, {d: rng.random() for d in held}
        )
    begun_s = time.process_time()
    assert plan_prefetches(demand, sizes, replicas, spares=True)
    assert in_time(time.process_time() - begun_s, 2.0)
