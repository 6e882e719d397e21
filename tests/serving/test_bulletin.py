"""What those who watch a replica hear, whenever they begin and however slowly they listen."""

import asyncio
from random import Random

import pytest

from lorikeet.routing.fleet import Fleet
from lorikeet.routing.news import from_stats, to_stats
from lorikeet.serving import bulletin as module
from lorikeet.serving.bulletin import Bulletin
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, StepCosts
from lorikeet_engine.news import EngineLoad, EngineNews

BUSY = EngineLoad(running=7, waiting=2, victim_uses=0.5)


def news(load=BUSY, **moved):
    return EngineNews(load, {digest: Residency[tier] for digest, tier in moved.items()})


def run(scenario):
    async def inside():
        return await asyncio.wait_for(scenario(Bulletin(StepCosts(base_s=0.007))), 10)

    return asyncio.run(inside())


async def close(*watches):
    for watch in watches:
        await watch.aclose()


def test_a_watch_begins_with_everything_and_goes_on_with_changes():
    async def scenario(bulletin):
        bulletin.post(news(a="GPU", b="DISK", c="HOST"))
        bulletin.post(news(c="REMOTE"))
        watch = bulletin.watch()
        first = await anext(watch)
        assert first.moved == {"a": Residency.GPU, "b": Residency.DISK}
        assert first.begins_whole
        assert first.ends_whole
        assert first.load == BUSY
        assert first.costs.steps.base_s == 0.007
        bulletin.post(news(EngineLoad(running=9), b="HOST", a="REMOTE"))
        change = await anext(watch)
        assert change.moved == {"b": Residency.HOST, "a": Residency.REMOTE}
        assert (change.begins_whole, change.ends_whole, change.costs) == (False, False, None)
        assert change.load.running == 9
        assert change.seq > first.seq
        await close(watch)

    run(scenario)


def test_many_adapters_come_in_parts(monkeypatch):
    monkeypatch.setattr(module, "_PART", 3)

    async def scenario(bulletin):
        bulletin.post(news(**{f"d{number}": "DISK" for number in range(7)}))
        watch = bulletin.watch()
        parts = [await anext(watch) for _ in range(3)]
        assert [len(part.moved) for part in parts] == [3, 3, 1]
        assert [part.begins_whole for part in parts] == [True, False, False]
        assert [part.ends_whole for part in parts] == [False, False, True]
        await close(watch)

    run(scenario)


def test_a_slow_watcher_gets_one_message_for_all_that_it_missed():
    async def scenario(bulletin):
        slow, quick = bulletin.watch(), bulletin.watch()
        await anext(slow)
        await anext(quick)
        for number in range(1000):
            bulletin.post(news(a="GPU" if number % 2 else "HOST", **{f"d{number % 10}": "DISK"}))
            await anext(quick)
        missed = await anext(slow)
        assert len(missed.moved) == 11
        assert missed.moved["a"] is Residency.GPU
        await close(slow, quick)

    run(scenario)


def test_a_quiet_replica_says_so(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)

    async def scenario(bulletin):
        watch = bulletin.watch()
        heard = [await anext(watch) for _ in range(4)]
        assert all(not one.moved for one in heard)
        assert [one.seq for one in heard] == sorted({one.seq for one in heard})
        await close(watch)

    run(scenario)


def test_a_watch_ends_by_itself_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)

    async def scenario(bulletin):
        assert len([one async for one in bulletin.watch(lasting_s=0.1)]) >= 2
        assert not bulletin._listeners

    run(scenario)


def test_stats_carry_load_and_costs_and_no_adapters():
    async def scenario(bulletin):
        bulletin.post(EngineNews(BUSY, {"a": Residency.GPU}, LoadCosts(disk_latency_s=0.5)))
        word = bulletin.word_with_costs()
        assert from_stats(to_stats(word)) == word
        assert word.costs.loads.disk_latency_s == 0.5
        assert not word.moved
        assert from_stats({}) is None

    run(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_that_listens_on_and_off_ends_up_knowing_what_is_held(monkeypatch, seed):
    monkeypatch.setattr(module, "_PART", 4)
    rng, digests = Random(seed), [f"d{number}" for number in range(20)]

    async def scenario(bulletin):
        fleet = Fleet()
        fleet.exist(["r0"])
        held = dict.fromkeys(digests, Residency.REMOTE)
        watch = bulletin.watch()
        for _ in range(2000):
            held[digest := rng.choice(digests)] = tier = rng.choice(list(Residency))
            bulletin.post(EngineNews(BUSY, {digest: tier}))
            if rng.random() < 0.3:
                fleet.heard("r0", await anext(watch))
            if rng.random() < 0.05:
                await close(watch)
                watch = bulletin.watch()
        bulletin.post(EngineNews(BUSY))
        while (message := await anext(watch)).moved:
            fleet.heard("r0", message)
        assert {d: fleet._residents.tier("r0", d) for d in digests} == held
        await close(watch)

    run(scenario)
