"""Subscribers learn a replica's state, whenever they begin and however slowly they read."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from lorikeet.protocol.status_update import PrefixRoom, from_stats, to_stats
from lorikeet.replica import status_feed as module
from lorikeet.replica.status_feed import StatusFeed
from lorikeet.routing.fleet import Fleet
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, MeasuredCosts, StepCosts
from lorikeet_engine.telemetry.status import (
    EngineStatus,
    EvictionCandidate,
    HostPageUsage,
    LiveStats,
)

BUSY = LiveStats(decoding=7, waiting=2, victim=EvictionCandidate(10, 0.5))
COSTS = MeasuredCosts(StepCosts(seen_token_s=0.007), LoadCosts(disk_latency_s=0.5))


def status(live=BUSY, **moved):
    where = {digest: Residency[tier] for digest, tier in moved.items()}
    return EngineStatus(live, costs=COSTS, moved=where)


def run(scenario):
    async def inside():
        return await asyncio.wait_for(scenario(StatusFeed(EngineStatus())), 10)

    return asyncio.run(inside())


async def close(*followers):
    for subscriber in followers:
        await subscriber.aclose()


def test_a_feed_begins_with_a_snapshot_and_continues_with_changes():
    async def scenario(feed):
        feed.post(status(a="GPU", b="DISK", c="HOST"))
        feed.post(status(c="REMOTE"))
        subscriber = feed.subscribe()
        first = await anext(subscriber)
        assert first.moved == {"a": Residency.GPU, "b": Residency.DISK}
        assert first.begins_snapshot
        assert first.ends_snapshot
        assert first.live == BUSY
        assert first.costs.steps.seen_token_s == 0.007
        feed.post(status(LiveStats(decoding=9), b="HOST", a="REMOTE"))
        change = await anext(subscriber)
        assert change.moved == {"b": Residency.HOST, "a": Residency.REMOTE}
        assert (change.begins_snapshot, change.ends_snapshot, change.costs) == (False, False, None)
        assert change.live.decoding == 9
        assert change.seq > first.seq
        await close(subscriber)

    run(scenario)


def test_a_feed_begins_with_the_longest_context():
    async def scenario(_):
        feed, fleet = StatusFeed(EngineStatus(), max_context=2048), Fleet()
        fleet.set_replicas(["r1", "r2"])
        assert fleet.max_context is None
        subscriber = feed.subscribe()
        fleet.on_status_update("r1", await anext(subscriber))
        feed.post(status())
        fleet.on_status_update("r1", await anext(subscriber))
        assert fleet.max_context == 2048
        longer = StatusFeed(EngineStatus(), max_context=4096).update_with_costs()
        fleet.on_status_update("r2", from_stats(to_stats(longer)))
        assert fleet.max_context == 2048
        fleet.set_replicas(["r2"])
        assert fleet.max_context == 4096
        await close(subscriber)

    run(scenario)


def test_a_feed_tells_the_room_for_prefixes_on_gpu_and_host():
    live = replace(EngineStatus().live, kv_pages_total=100)
    host = HostPageUsage(7, 300, 4096, 0, 0, 0, 0, 0)

    def room(**more):
        update = StatusFeed(EngineStatus(live=live, **more), kv_tokens=1600).update_with_costs()
        return from_stats(to_stats(update)).prefix_room

    assert room(host_pages=host) == PrefixRoom(1600, 4800, 256)
    assert room() == PrefixRoom(1600, 0, 0)
    assert StatusFeed(EngineStatus(live=live)).update_with_costs().prefix_room is None


def test_a_large_snapshot_comes_in_parts(monkeypatch):
    monkeypatch.setattr(module, "_SNAPSHOT_PART", 3)

    async def scenario(feed):
        feed.post(status(**{f"d{number}": "DISK" for number in range(7)}))
        subscriber = feed.subscribe()
        parts = [await anext(subscriber) for _ in range(3)]
        assert [len(part.moved) for part in parts] == [3, 3, 1]
        assert [part.begins_snapshot for part in parts] == [True, False, False]
        assert [part.ends_snapshot for part in parts] == [False, False, True]
        await close(subscriber)

    run(scenario)


def test_a_slow_subscriber_gets_one_update_for_all_missed_changes():
    async def scenario(feed):
        slow, quick = feed.subscribe(), feed.subscribe()
        await anext(slow)
        await anext(quick)
        for number in range(1000):
            feed.post(status(a="GPU" if number % 2 else "HOST", **{f"d{number % 10}": "DISK"}))
            await anext(quick)
        missed = await anext(slow)
        assert len(missed.moved) == 11
        assert missed.moved["a"] is Residency.GPU
        await close(slow, quick)

    run(scenario)


def test_each_status_of_an_engine_is_an_update_even_without_changes():
    async def scenario(feed):
        subscriber = feed.subscribe()
        heard = [await anext(subscriber)]
        for _ in range(3):
            feed.post(EngineStatus())
            heard.append(await anext(subscriber))
        assert all(not one.moved for one in heard)
        assert [one.seq for one in heard] == sorted({one.seq for one in heard})
        await close(subscriber)

    run(scenario)


def test_a_feed_of_a_silent_engine_has_only_a_snapshot():
    async def scenario(feed):
        assert len([one async for one in feed.subscribe(lasting_s=0.1)]) == 1

    run(scenario)


def test_a_feed_ends_after_its_duration_and_removes_its_subscriber():
    async def scenario(feed):
        heard = 0
        async for _ in feed.subscribe(lasting_s=0.1):
            heard += 1
            feed.post(EngineStatus())
        assert heard >= 2
        assert not feed._subscribers

    run(scenario)


def test_stats_carry_live_stats_and_costs_and_no_adapters():
    async def scenario(feed):
        feed.post(status(a="GPU"))
        update = feed.update_with_costs()
        assert from_stats(to_stats(update)) == update
        assert update.costs == COSTS
        assert not update.moved
        assert from_stats({}) is None

    run(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_that_resubscribes_ends_with_the_held_adapters(monkeypatch, seed):
    monkeypatch.setattr(module, "_SNAPSHOT_PART", 4)
    rng, digests = Random(seed), [f"d{number}" for number in range(20)]

    async def scenario(feed):
        fleet = Fleet()
        fleet.set_replicas(["r0"])
        held = dict.fromkeys(digests, Residency.REMOTE)
        subscriber = feed.subscribe()
        for _ in range(2000):
            held[digest := rng.choice(digests)] = tier = rng.choice(list(Residency))
            feed.post(status(**{digest: tier.name}))
            if rng.random() < 0.3:
                fleet.on_status_update("r0", await anext(subscriber))
            if rng.random() < 0.05:
                await close(subscriber)
                subscriber = feed.subscribe()
        feed.post(status())
        while (message := await anext(subscriber)).moved:
            fleet.on_status_update("r0", message)
            feed.post(status())
        assert {d: fleet._locations.tier("r0", d) for d in digests} == held
        await close(subscriber)

    run(scenario)
