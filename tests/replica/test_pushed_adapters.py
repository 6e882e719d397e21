"""A replica takes a pushed adapter that is not in the store, and holds it on the host."""

import asyncio
import errno
import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from demo.fill_catalog import ADAPTERS
from demo.tasks import TASKS
from lorikeet.protocol.pushing import (
    ExpectPushed,
    HoldPushed,
    HoldState,
    LookUp,
    PushedEnd,
    PushedPart,
    ReleasePushed,
    this_machine,
)
from lorikeet.replica import pushed_adapters
from lorikeet.replica.pushed_adapters import PushedAdapters
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.errors import EngineClosed
from tests.replica.test_replica import CALL, items_of, run, until

TASK = TASKS[0]
ELSEWHERE = "/of/another/machine"


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "catalog").mkdir()
    given = {
        "LORIKEET_CATALOG": str(tmp_path / "catalog"),
        "LORIKEET_CACHE_DIR": str(tmp_path / "cache"),
    }
    return Settings.from_env(given)


@pytest.fixture
def pushed(tmp_path):
    """A new adapter, and its blob."""
    folder = shutil.copytree(ADAPTERS / TASK.tenant / TASK.name, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 77}))
    digest = write_blob(folder, tmp_path / "blob")
    return AdapterRef(TASK.tenant, TASK.name, 9, digest), (tmp_path / "blob").read_bytes()


async def send(replica, ref, blob, transfer="t1", part_bytes=10_000):
    """Send a blob's parts, the last ones first, and their end."""
    for offset in reversed(range(0, len(blob), part_bytes)):
        data = blob[offset : offset + part_bytes]
        await replica.push(PushedPart(ref.digest, transfer, offset, data))
    return await replica.push(PushedEnd(ref.digest, transfer))


def is_pinned(ref):
    def holds(report):
        return any(each.digest == ref.digest and each.pinned for each in report.adapters)

    return holds


def test_a_pushed_adapter_is_on_the_host_and_answers_without_any_store(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        before = await replica.push(HoldPushed(ref, ELSEWHERE))
        sent = await send(replica, ref, blob)
        held = await replica.push(HoldPushed(ref, ELSEWHERE))
        found = await replica.push(LookUp(ref.digest))
        await until(is_pinned(ref), replica)
        items = await items_of(replica, replace(CALL, adapter=ref))
        return before, sent, held, found, items[0]

    before, sent, held, found, header = run(settings, scenario)
    assert (before, sent) == (HoldState.LACKING, HoldState.LOADING)
    assert (held, found) == (HoldState.HELD, HoldState.HELD)
    assert (header.digest, header.residency) == (ref.digest, Residency.HOST)


@pytest.mark.parametrize("linkable", [True, False])
def test_the_file_of_a_gateway_on_this_machine_is_taken_from_there(
    settings, pushed, tmp_path, monkeypatch, linkable
):
    ref, blob = pushed
    file = tmp_path / "blob"
    if not linkable:
        monkeypatch.setattr(pushed_adapters.os, "link", on_another_file_system)

    async def scenario(replica):
        held = await replica.push(HoldPushed(ref, str(file)))
        file.unlink()  # the gateway's push has ended
        await until(is_pinned(ref), replica)
        return held, await items_of(replica, replace(CALL, adapter=ref))

    held, (header, *_) = run(settings, scenario)
    assert (held, header.digest) == (HoldState.HELD, ref.digest)
    assert (settings.cache_dir / ref.digest).read_bytes() == blob
    assert not list(settings.cache_dir.glob(f"{ref.digest}.*"))  # neither a part nor an image


def test_a_blob_is_packed_while_a_gateway_of_the_machine_writes_it(settings, pushed, tmp_path):
    ref, blob = pushed
    file = tmp_path / "coming"
    file.touch()

    async def scenario(replica):
        expected = ExpectPushed(ref.digest, str(file), len(blob), this_machine())
        states = [await replica.push(expected)]
        await asyncio.to_thread(file.write_bytes, blob)
        await until(lambda report: report.status.tiers[Residency.HOST].adapters == 1, replica)
        states.append(await replica.push(LookUp(ref.digest)))
        states.append(await replica.push(HoldPushed(ref, str(file))))
        file.unlink()
        return states, await items_of(replica, replace(CALL, adapter=ref))

    states, (header, *_) = run(settings, scenario)
    assert states == [HoldState.LACKING, HoldState.LACKING, HoldState.HELD]
    assert (header.digest, header.residency) == (ref.digest, Residency.HOST)


class SlowlyTold:
    """An engine that loads an adapter in its third look, and whose status never says so."""

    def __init__(self):
        self.looks, self.closed = 0, False
        self.expected = []

    def expect(self, *arguments):
        self.expected.append(arguments)

    def residency(self, _ref):
        self.looks += 1
        told = Future()
        if self.closed:
            told.set_exception(EngineClosed("closed"))
        else:
            told.set_result(Residency.HOST if self.looks > 3 else Residency.DISK)
        return told

    def pin(self, *_, passing):
        assert passing

    def unpin(self, *_):
        pass


def test_the_engine_is_asked_because_its_status_is_late(pushed, tmp_path):
    ref, blob = pushed
    (tmp_path / ref.digest).write_bytes(blob)
    engine = SlowlyTold()
    held = PushedAdapters(tmp_path, engine, lambda _: Residency.DISK, lambda _: None)

    async def scenario():
        states = [await held.answer(each) for each in (HoldPushed(ref, ""), LookUp(ref.digest))]
        looks = engine.looks
        engine.closed = True
        states.append(await held.answer(LookUp(ref.digest)))
        states.append(await held.answer(ReleasePushed(ref.digest)))
        return states, looks

    states, looks = asyncio.run(scenario())
    assert states == [HoldState.HELD, HoldState.HELD, HoldState.LOADING, HoldState.LOADING]
    assert 4 <= looks <= 6


def test_no_blob_is_expected_if_present_or_on_another_machine(pushed, tmp_path):
    ref, blob = pushed
    engine = SlowlyTold()
    held = PushedAdapters(tmp_path, engine, lambda _: Residency.REMOTE, lambda _: None)

    def answer(machine):
        return asyncio.run(held.answer(ExpectPushed(ref.digest, "/tmp/x", 9, machine)))

    assert answer("another") is HoldState.LACKING
    assert engine.expected == []
    assert answer(this_machine()) is HoldState.LACKING
    assert engine.expected == [(ref.digest, Path("/tmp/x"), 9)]
    (tmp_path / ref.digest).write_bytes(blob)
    assert answer(this_machine()) is HoldState.LOADING
    assert len(engine.expected) == 1


def test_a_damaged_copy_of_a_gateways_file_is_rejected(pushed, tmp_path, monkeypatch):
    ref, blob = pushed
    (tmp_path / "theirs").write_bytes(blob[:-1] + b"?")
    (cache := tmp_path / "cache").mkdir()
    held = PushedAdapters(cache, SlowlyTold(), lambda _: Residency.REMOTE, lambda _: None)
    monkeypatch.setattr(pushed_adapters.os, "link", on_another_file_system)
    assert not held._copy_file(ref.digest, str(tmp_path / "theirs"))
    assert not list(cache.iterdir())
    (tmp_path / "theirs").write_bytes(blob)
    assert held._copy_file(ref.digest, str(tmp_path / "theirs"))
    assert (cache / ref.digest).read_bytes() == blob


def on_another_file_system(*_):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_a_released_adapter_may_be_evicted_again(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        await send(replica, ref, blob)
        await replica.push(HoldPushed(ref, ELSEWHERE))
        await until(is_pinned(ref), replica)
        await replica.push(ReleasePushed(ref.digest))
        await until(lambda report: not is_pinned(ref)(report), replica)

    run(settings, scenario)


def test_a_hold_that_is_not_renewed_is_released(settings, pushed, monkeypatch):
    monkeypatch.setattr(pushed_adapters, "HELD_S", 0.5)
    ref, blob = pushed

    async def scenario(replica):
        await send(replica, ref, blob)
        await replica.push(HoldPushed(ref, ELSEWHERE))
        await until(is_pinned(ref), replica)
        await until(lambda report: not is_pinned(ref)(report), replica)

    run(settings, scenario)


def test_a_damaged_or_incomplete_blob_is_rejected(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        damaged = await send(replica, ref, blob[:-1] + b"?")
        half = await send(replica, ref, blob[:100], transfer="t2")
        never = await replica.push(PushedEnd(ref.digest, "t3"))
        return damaged, half, never, await replica.push(HoldPushed(ref, ELSEWHERE))

    assert set(run(settings, scenario)) == {HoldState.LACKING}
    assert not [path for path in settings.cache_dir.iterdir() if path.name.startswith(ref.digest)]


def test_two_gateways_may_send_one_blob_at_the_same_time(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        sent = (send(replica, ref, blob, transfer) for transfer in ("t1", "t2"))
        return *await asyncio.gather(*sent), await replica.push(HoldPushed(ref, ELSEWHERE))

    *sent, held = run(settings, scenario)
    assert (set(sent), held) == ({HoldState.LOADING}, HoldState.HELD)


def test_a_present_blob_is_neither_written_nor_replaced(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        await send(replica, ref, blob)
        path = settings.cache_dir / ref.digest
        before = path.stat().st_ino
        await replica.push(PushedPart(ref.digest, "t2", 0, blob[:100]))
        parts = list(settings.cache_dir.glob(f"{ref.digest}.*.part"))
        again = await replica.push(PushedEnd(ref.digest, "t2"))
        return parts, again, path.stat().st_ino == before

    parts, again, same = run(settings, scenario)
    assert (parts, again, same) == ([], HoldState.LOADING, True)


def test_two_transfers_of_a_blob_end_with_the_file_of_the_first(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        for transfer in ("t1", "t2"):
            await replica.push(PushedPart(ref.digest, transfer, 0, blob))
        ends, files = [], []
        for transfer in ("t1", "t2"):
            ends.append(await replica.push(PushedEnd(ref.digest, transfer)))
            files.append((settings.cache_dir / ref.digest).stat().st_ino)
        return ends, files

    ends, files = run(settings, scenario)
    assert ends == [HoldState.LOADING] * 2
    assert files[0] == files[1]
    assert not list(settings.cache_dir.glob(f"{ref.digest}.*.part"))


def test_a_part_after_the_end_leaves_no_file(settings, pushed):
    ref, blob = pushed

    async def scenario(replica):
        await send(replica, ref, blob[:100])
        await replica.push(PushedPart(ref.digest, "t1", 100, blob[100:]))
        return list(settings.cache_dir.glob(f"{ref.digest}.*"))

    assert run(settings, scenario) == []
