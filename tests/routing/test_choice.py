"""What the cost of a replica depends on, and in which direction."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from time import thread_time

import pytest

from lorikeet.rendezvous import by_preference
from lorikeet.routing.choice import Load, Option, Work, choose, expected_cost, expected_cost_s
from lorikeet.routing.costs import H200_LLAMA_8B as COSTS
from lorikeet.routing.handful import HOMES, NEAR, RESIDENTS, Homes, handful
from lorikeet_engine.adapter import Residency

MB = 1 << 20
WORK = Work(prompt_tokens=800, rank=16, adapter_bytes=84 * MB)
ROOM = 10_000 * MB


def load(**changes) -> Load:
    return replace(
        Load(running=40, ranks=600, waiting=2, waiting_tokens=1500, room_bytes=ROOM), **changes
    )


def cost_s(work=WORK, **option) -> float:
    return expected_cost_s(work, Option(replica=0, **{"load": load(), **option}), COSTS)


def test_nearer_tiers_cost_less():
    idle = load(waiting=0, waiting_tokens=0)
    costs = [cost_s(load=idle, tier=tier) for tier in Residency]
    assert all(nearer < farther for farther, nearer in pairwise(costs))


@pytest.mark.parametrize(
    "more",
    [
        {"waiting_tokens": 9000},
        {"waiting": 9},
        {"running": 41},
        {"running": 250},
        {"running": 256},
        {"ranks": 900},
    ],
    ids=str,
)
def test_a_busier_replica_costs_more(more):
    for tier in Residency:
        assert cost_s(load=load(**more), tier=tier) >= cost_s(tier=tier)
    assert cost_s(load=load(**more)) > cost_s()


def test_a_rank_that_is_in_the_batch_already_costs_nothing_more():
    assert cost_s(running=True) < cost_s()
    gains = [cost_s(WORK._replace(rank=rank)) - cost_s(running=True) for rank in (8, 16, 32, 64)]
    assert gains == sorted(gains)


def test_a_load_behind_others_in_an_arena_that_is_leased_or_used_costs_more():
    idle = load(waiting=0, waiting_tokens=0)
    cold = {"tier": Residency.HOST, "load": idle}
    for worse in (
        {"load": replace(idle, loading_bytes=5000 * MB)},
        {"load": replace(idle, room_bytes=0)},
        {"lost_uses": 1.0},
    ):
        assert cost_s(**{**cold, **worse}) > cost_s(**cold)


def test_a_load_overlaps_with_the_wait_for_a_seat():
    free, full = load(waiting=0, waiting_tokens=0), load(waiting_tokens=40_000)
    added_when_free_s = cost_s(load=free, tier=Residency.DISK) - cost_s(load=free)
    added_when_full_s = cost_s(load=full, tier=Residency.DISK) - cost_s(load=full)
    assert added_when_free_s > added_when_full_s == pytest.approx(COSTS.copy_s)


def test_what_is_cached_of_a_prompt_and_a_load_that_has_begun_cost_less():
    assert cost_s(cached_tokens=640) < cost_s(cached_tokens=64) < cost_s()
    assert cost_s(cached_tokens=WORK.prompt_tokens + 9) > 0
    idle = load(waiting=0, waiting_tokens=0)
    begun = replace(idle, loading_bytes=WORK.adapter_bytes)
    cold = cost_s(tier=Residency.DISK, load=idle)
    assert cost_s(load=idle) < cost_s(tier=Residency.DISK, load=begun, arriving=True) < cold


def test_many_sequences_cost_others_more_than_one():
    assert cost_s(WORK._replace(sequences=8)) > cost_s()
    nearly_full = load(running=250)
    assert cost_s(WORK._replace(sequences=16), load=nearly_full) > cost_s(
        WORK._replace(sequences=2), load=nearly_full
    )


def test_the_base_model_goes_where_least_is_to_do():
    options = [Option(i, load(waiting_tokens=tokens)) for i, tokens in enumerate((900, 300, 600))]
    assert choose(Work(prompt_tokens=100), options, COSTS) == 1


def test_equal_replicas_keep_their_order():
    assert choose(WORK, [Option("first", load()), Option("second", load())], COSTS) == "first"


def test_a_hot_adapter_spreads_once_its_replica_is_busy_enough_and_no_sooner():
    elsewhere = Option("elsewhere", load(waiting_tokens=0), Residency.HOST)
    chosen = [
        choose(WORK, [Option("home", load(waiting_tokens=tokens), running=True), elsewhere], COSTS)
        for tokens in range(0, 60_000, 500)
    ]
    assert chosen == sorted(chosen, reverse=True)  # once away, it does not come back
    assert chosen[0] == "home"
    assert chosen[-1] == "elsewhere"


def test_a_handful_has_residents_those_near_and_strangers_once_each():
    rng, everyone = Random(1), list(range(1000))
    for residents in ([], [5], list(range(RESIDENTS)), everyone):
        for _ in range(50):
            few = handful(residents, [5, 7], everyone, rng)
            assert len(few) == len(set(few))
            assert {5, 7} <= set(few)
            from_residents = min(len(residents), RESIDENTS)
            assert len(few) <= from_residents + NEAR + 2
            assert set(few[:from_residents]) <= set(residents)


def test_of_two_replicas_both_are_looked_at():
    assert all(len(handful((), (), [0, 1], Random(seed))) == 2 for seed in range(50))
    assert handful((), (), [0], Random(1)) == [0]


def test_every_resident_and_every_replica_gets_its_turn():
    rng, everyone = Random(1), list(range(30))
    seen = {one for _ in range(500) for one in handful(range(10), (), everyone, rng)}
    assert seen == set(everyone)


def test_homes_are_the_first_by_preference_remembered_or_not():
    replicas = [f"r{i}" for i in range(20)]
    homes = Homes(replicas)
    for digest in ("a", "b", "a"):
        assert list(homes.of(digest)) == by_preference(digest, replicas)[:HOMES]


def test_one_choice_takes_less_than_0_3_ms():
    """64 replicas, 10,000 adapters; every second choice has to find the adapter's homes."""
    rng, replicas = Random(1), [f"replica-{i}" for i in range(64)]
    loads = {name: load(running=rng.randrange(200)) for name in replicas}
    homes, took_s = Homes(replicas), []
    residents = {digest: rng.sample(replicas, 1 + digest % 5) for digest in range(10_000)}
    for request in range(4000):
        digest = request // 2
        began_s = thread_time()
        few = handful(residents[digest], homes.of(str(digest)), replicas, rng)
        here = residents[digest]
        options = [
            Option(name, loads[name], Residency.GPU if name in here else Residency.DISK)
            for name in few
        ]
        choose(WORK, options, COSTS)
        took_s.append(thread_time() - began_s)
    assert sorted(took_s)[3960] <= 0.3e-3


@pytest.mark.parametrize("tier", Residency)
def test_the_wait_and_the_load_overlap_and_all_else_adds_up(tier):
    option = Option(replica=0, load=load(), tier=tier, lost_uses=2.0)
    cost = expected_cost(WORK, option, COSTS)
    assert all(part >= 0 for part in cost)
    longer_s, shorter_s = max(cost.queue_s, cost.load_s), min(cost.queue_s, cost.load_s)
    assert cost.total_s == pytest.approx(sum(cost) - shorter_s)
    assert expected_cost_s(WORK, option, COSTS) == cost.total_s
    assert (cost.load_s == cost.copy_s == 0) == (tier is Residency.GPU)
    assert longer_s > 0
