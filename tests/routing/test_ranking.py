"""Expected cost of a replica, and the candidate sample."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from lorikeet.protocol.messages import Work
from lorikeet.rendezvous import CANDIDATES, by_preference, rendezvous_candidates
from lorikeet.routing.ranking import H200_LLAMA_8B as COSTS
from lorikeet.routing.ranking import (
    MOST_OFF_GPU,
    MOST_ON_GPU,
    Holders,
    ReplicaOption,
    RoutingStatus,
    candidate_sample,
    expected_cost,
    rank_by_cost,
)
from lorikeet_engine.adapter import Residency

MB = 1 << 20
WORK = Work(prompt_tokens=800, rank=16, adapter_bytes=84 * MB)
ROOM = 10_000 * MB


def status(**changes) -> RoutingStatus:
    usual = RoutingStatus(running=40, ranks=600, waiting=2, waiting_tokens=1500, room_bytes=ROOM)
    return replace(usual, **changes)


def option(replica="any", now=None, **more) -> ReplicaOption:
    return ReplicaOption(replica, status() if now is None else now, COSTS, **more)


def cost_s(work=WORK, now=None, **more) -> float:
    return expected_cost(work, option(now=now, **more)).total_s


def first(*options, work=WORK):
    return rank_by_cost(work, options)[0].replica


def sample(on_gpu, off_gpu, everyone, rng, rendezvous=tuple):
    return candidate_sample(Holders(on_gpu, off_gpu, rendezvous), everyone, rng)


def test_nearer_tiers_cost_less():
    idle = status(waiting=0, waiting_tokens=0)
    costs = [cost_s(now=idle, tier=tier) for tier in Residency]
    assert all(nearer < farther for farther, nearer in pairwise(costs))


@pytest.mark.parametrize(
    "more",
    [
        {"waiting_tokens": 9000},
        {"waiting_seen": 10**8},
        {"context": 10**5},
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
        assert cost_s(now=status(**more), tier=tier) >= cost_s(tier=tier)
    assert cost_s(now=status(**more)) > cost_s()


def test_of_two_equal_replicas_the_one_with_shorter_contexts_is_first():
    long, short = status(context=40 * 32_000), status(context=40 * 500)
    assert first(option("long", long), option("short", short)) == "short"


def test_uncached_tokens_still_attend_to_cached_tokens():
    long = Work(prompt_tokens=100_000)
    fresh, deep = (
        expected_cost(work, option(cached_tokens=cached)).prefill_s
        for work, cached in ((Work(prompt_tokens=4000), 0), (long, 96_000))
    )
    assert fresh < deep < expected_cost(long, option()).prefill_s


def test_an_adapter_that_is_in_the_batch_adds_no_rank():
    assert cost_s(running=True) < cost_s()
    gains = [cost_s(WORK._replace(rank=rank)) - cost_s(running=True) for rank in (8, 16, 32, 64)]
    assert gains == sorted(gains)


def test_a_load_costs_more_behind_others_or_in_a_leased_or_used_arena():
    idle = status(waiting=0, waiting_tokens=0)
    cold = {"tier": Residency.HOST, "now": idle}
    for worse in (
        {"now": replace(idle, loading_bytes=5000 * MB)},
        {"now": replace(idle, room_bytes=0)},
        {"evicted_uses": 1.0},
    ):
        assert cost_s(**{**cold, **worse}) > cost_s(**cold)


def test_a_load_overlaps_with_the_wait_for_running_capacity():
    free, full = status(waiting=0, waiting_tokens=0), status(waiting_tokens=40_000)
    added_when_free_s = cost_s(now=free, tier=Residency.DISK) - cost_s(now=free)
    added_when_full_s = cost_s(now=full, tier=Residency.DISK) - cost_s(now=full)
    assert added_when_free_s > added_when_full_s == pytest.approx(COSTS.copy_s)


def test_a_cached_prefix_and_a_started_load_lower_the_cost():
    assert cost_s(cached_tokens=640) < cost_s(cached_tokens=64) < cost_s()
    assert cost_s(cached_tokens=WORK.prompt_tokens + 9) > 0
    idle = status(waiting=0, waiting_tokens=0)
    begun = replace(idle, loading_bytes=WORK.adapter_bytes)
    cold = cost_s(tier=Residency.DISK, now=idle)
    assert cost_s(now=idle) < cost_s(tier=Residency.DISK, now=begun, loading=True) < cold


def test_a_prefix_on_the_host_costs_its_fetch_or_its_computation():
    work = Work(prompt_tokens=4000)

    def prefill_s(**given):
        return expected_cost(work, option(**given)).prefill_s

    on_gpu, uncached = prefill_s(cached_tokens=3840), prefill_s()
    on_host = {"cached_tokens": 3840, "host_tokens": 3840}
    fetched = prefill_s(**on_host, host_bytes=480 * MB)
    assert fetched == pytest.approx(on_gpu + COSTS.loads.load_s(Residency.HOST, 480 * MB))
    assert fetched < uncached
    assert prefill_s(**on_host, host_bytes=10**6 * MB) == uncached


def test_many_sequences_cost_others_more_than_one():
    assert cost_s(WORK._replace(sequences=8)) > cost_s()
    nearly_full = status(running=250)
    assert cost_s(WORK._replace(sequences=16), now=nearly_full) > cost_s(
        WORK._replace(sequences=2), now=nearly_full
    )


def test_a_base_model_request_goes_to_the_least_loaded_replica():
    options = [option(i, status(waiting_tokens=n)) for i, n in enumerate((900, 300, 600))]
    ranked = rank_by_cost(Work(prompt_tokens=100), options)
    assert [each.replica for each in ranked] == [1, 2, 0]


def test_equal_replicas_keep_their_order():
    assert first(option("first"), option("second")) == "first"


def test_replicas_that_cannot_fetch_a_missing_adapter_rank_last():
    tiers = zip("rdhg", sorted(Residency), (0, 90_000, 90_000, 90_000), strict=True)
    options = [option(name, status(waiting_tokens=n), tier=tier) for name, tier, n in tiers]
    assert [each.replica for each in rank_by_cost(WORK, options)] == [*"rgdh"]
    in_vain = [each._replace(can_fetch=False) for each in options]
    assert [each.replica for each in rank_by_cost(WORK, in_vain)] == [*"gdhr"]


def test_a_hot_adapter_spreads_only_once_its_replica_is_busy_enough():
    elsewhere = option("elsewhere", status(waiting_tokens=0), tier=Residency.HOST)
    chosen = [
        first(option("holder", status(waiting_tokens=tokens), running=True), elsewhere)
        for tokens in range(0, 60_000, 500)
    ]
    assert chosen == sorted(chosen, reverse=True)  # once away, it does not come back
    assert chosen[0] == "holder"
    assert chosen[-1] == "elsewhere"


def test_a_sample_has_holders_on_and_off_the_gpu_and_two_random_replicas_each_once():
    rng, everyone = Random(1), list(range(1000))
    for residents in ([], [5], list(range(MOST_ON_GPU)), everyone):
        for _ in range(50):
            few = sample(residents, [5, 7], everyone, rng)
            assert len(few) == len(set(few))
            assert {5, 7} <= set(few)
            from_residents = min(len(residents), MOST_ON_GPU)
            assert len(few) <= from_residents + MOST_OFF_GPU + 2
            assert set(few[:from_residents]) <= set(residents)


def test_a_sample_has_two_of_many_replicas_with_the_adapter_on_the_gpu():
    rng, everyone = Random(1), list(range(4))
    samples = [sample(everyone, (), everyone, rng) for _ in range(200)]
    assert {len(set(few)) for few in samples} == {2}
    assert len({frozenset(few) for few in samples}) == 6  # each pair


def test_a_sample_of_two_replicas_has_both():
    assert all(len(candidate_sample(None, [0, 1], Random(seed))) == 2 for seed in range(50))
    assert candidate_sample(None, [0], Random(1)) == [0]


def test_every_holder_and_every_replica_is_sampled_sometimes():
    rng, everyone = Random(1), list(range(30))
    seen = {one for _ in range(500) for one in sample(range(10), (), everyone, rng)}
    assert seen == set(everyone)


def test_a_sample_has_rendezvous_candidates_when_no_replica_has_the_adapter():
    rng, everyone = Random(1), list(range(1000))
    assert {5, 7} <= set(sample((), (), everyone, rng, lambda: [5, 7]))
    assert 5 not in sample([1], (), everyone, rng, lambda: [5])
    assert 5 not in sample((), [1], everyone, rng, lambda: [5])


def test_rendezvous_candidates_are_the_first_by_preference_cached_or_not():
    replicas = tuple(f"r{i}" for i in range(20))
    for digest in ("a", "b", "a"):
        wanted = by_preference(digest, replicas)[:CANDIDATES]
        assert rendezvous_candidates(digest, replicas) == wanted


@pytest.mark.parametrize("tier", Residency)
def test_the_wait_and_the_load_overlap_and_the_other_costs_add_up(tier):
    cost = expected_cost(WORK, option(tier=tier, evicted_uses=2.0))
    assert all(part >= 0 for part in cost)
    longer_s, shorter_s = max(cost.queue_s, cost.load_s), min(cost.queue_s, cost.load_s)
    assert cost.total_s == pytest.approx(sum(cost) - shorter_s)
    assert (cost.load_s == cost.copy_s == 0) == (tier is Residency.GPU)
    assert longer_s > 0
