"""Memory that moves between adapters and KV pages: answers stay the same, on one rank and on two.

test_random_traffic.py moves it in random traffic; memory that moves away is spoilt on a CPU.
"""

import itertools
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from lorikeet_engine.device import border_memory
from lorikeet_engine.device.border_memory import (
    BorderMemory,
    BorderUnit,
    CudaBorderMemory,
    MoveUnit,
)
from lorikeet_engine.execution import assembly, border
from lorikeet_engine.execution.memory_plan import plan_memory
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.scheduling.border_policy import BorderPolicy
from lorikeet_engine.scheduling.page_pool import PagePool
from tests.engine.blobs import Shelf
from tests.engine.checked_engine import ADAPTER_BYTES, CheckedEngine
from tests.engine.engine_driver import Answers, build, greedy, nothing_is_held, prompt
from tests.engine.process_engines import followers

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTERS, REQUESTS, TOKENS = 6, 30, 12
SIZES = {"kv_pages": 512, "max_context": 96, "max_running": 8, "max_batch_tokens": 48}


@pytest.fixture
def config(tiny_checkpoints):
    return ModelConfig.from_folder(tiny_checkpoints["llama"])


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "blobs")


@pytest.fixture
def refs(shelf, config):
    ranks = {(layer, linear): 32 for layer in (0, 1) for linear in range(4)}
    return [shelf.make(f"a{i}", ranks, shape=config.shape) for i in range(ADAPTERS)]


def answers_of(engine, refs):
    answers = Answers(engine)
    for i in range(REQUESTS):
        tokens = [*prompt(40, i % 3), *prompt(4, i)]
        answers.submit(greedy(f"r{i}", tokens, adapter=refs[i % len(refs)], max_tokens=TOKENS))
    answers.all()
    assert nothing_is_held(engine)
    return answers.tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_stay_the_same_while_memory_moves(
    ranks, refs, shelf, tiny_checkpoints, tmp_path, monkeypatch, forked_followers
):
    checkpoint = tiny_checkpoints["llama"]
    fixed = build(checkpoint, shelf, tmp_path / "a", **SIZES)
    expected = answers_of(fixed, refs)
    fixed.close()
    chance = random.Random(5)
    monkeypatch.setattr(border, "EVERY_S", 0)
    monkeypatch.setattr(BorderPolicy, "decide", lambda *_: chance.choice((2, 2, -2)))
    moving = {"moving_border": True, "adapter_gpu_bytes": 1, "tensor_parallel": ranks}
    engine = build(checkpoint, shelf, tmp_path / "b", **SIZES, **moving)
    least = engine.status().border
    assert least.arena_units == 1, "the arena begins with its least size, in whole units"
    assert answers_of(engine, refs) == expected
    now = engine.status().border
    assert now.to_adapters >= 5
    assert now.to_pages >= 5
    assert now.arena_units + now.kv_units == least.arena_units + least.kv_units
    assert now.kv_units >= least.kv_units - least.lendable_units > 0
    engine.close()
    assert not followers()


def test_adapters_borrow_by_demand_and_keep_it_while_pages_need_nothing(
    refs, shelf, tiny_checkpoints, tmp_path, monkeypatch
):
    monkeypatch.setattr(border, "EVERY_S", 0.01)
    moving = {"moving_border": True, "adapter_gpu_bytes": 1}
    engine = build(tiny_checkpoints["llama"], shelf, tmp_path / "b", **SIZES, **moving)
    for _ in range(4):
        answers_of(engine, refs)
    now = engine.status()
    assert now.border.arena_units > 1
    assert now.border.to_pages == 0
    engine.close()


def test_after_a_move_that_fails_the_border_stays_and_sequences_keep_all_other_pages(
    refs, shelf, tiny_checkpoints, tmp_path, monkeypatch, caplog
):
    move, calls = BorderMemory._move, itertools.count()

    def fail_after_two(memory, wanted):
        if next(calls) >= 2:
            raise RuntimeError("cuMemMap failed with CUDA driver error 999")
        move(memory, wanted)

    monkeypatch.setattr(BorderMemory, "_move", fail_after_two)
    monkeypatch.setattr(border, "EVERY_S", 0)
    monkeypatch.setattr(BorderPolicy, "decide", lambda *_: 8)
    moving = {"moving_border": True, "adapter_gpu_bytes": 1}
    engine = build(tiny_checkpoints["llama"], shelf, tmp_path / "b", **SIZES, **moving)
    assert len(answers_of(engine, refs)) == REQUESTS
    status = engine.status()
    now = status.border
    assert "cuMemMap failed" in caplog.text
    assert (now.to_adapters, now.moving) == (2, 0)
    assert now.lent_units > 2
    units = now.kv_units + now.lent_units
    assert status.live.kv_pages_total == SIZES["kv_pages"] * now.kv_units // units
    engine.close()


def test_the_least_recently_used_pages_leave_first(tmp_path, monkeypatch):
    monkeypatch.setitem(border_memory.GRANULES, "cpu", 64)  # a unit is a page
    monkeypatch.setattr(border, "EVERY_S", 0)
    monkeypatch.setattr(BorderPolicy, "decide", lambda *_: wanted)
    wanted = 0
    sizes = {"max_context": 24, "max_running": 3, "max_batch_tokens": 24}
    moving = {"moving_border": True, "adapter_gpu_bytes": ADAPTER_BYTES}
    engine = CheckedEngine(tmp_path, kv_pages=30, **sizes, **moving)

    def computed(first):
        before, sampling = engine.model.tokens, SamplingParams(1, temperature=0.0)
        engine.submit((first, *range(20)), sampling=sampling)
        engine.drain_requests()
        return engine.model.tokens - before

    alone = [computed(first) for first in (5, 6, 7)]
    assert computed(5) < alone[0]
    wanted = 1
    for _ in range(22):
        engine.step()
    wanted = 0
    assert engine.engine.status().live.kv_pages_total < 10
    assert computed(5) < alone[0], "used last, and still there"
    assert computed(6) == alone[1]
    engine.drain()


class BookedDriver:
    """Driver without a GPU: keeps books of memory, and refuses what NVIDIA's would refuse."""

    def __init__(self, _index=0):
        self.handles, self.at, self.ranges, self.maps_left = set(), {}, {}, 100

    def reserve(self, size):
        begin = (len(self.ranges) + 1) << 40
        self.ranges[begin] = size
        return begin

    def create(self, _size):
        self.handles.add(handle := len(self.handles) + 1)
        return handle

    def map(self, address, _size, handle):
        self.maps_left -= 1
        if self.maps_left < 0:
            raise RuntimeError("cuMemMap: out of memory")
        assert handle in self.handles - set(self.at.values())
        assert address not in self.at
        self.at[address] = handle

    def allow(self, address, size):
        assert {address, address + size - GRANULE} <= self.at.keys()

    def unmap(self, address, size):
        for granule in range(address, address + size, GRANULE):
            del self.at[granule]

    def release(self, handle):
        assert handle not in self.at.values()
        self.handles.remove(handle)

    def free(self, address, size):
        assert self.ranges.pop(address) == size


GRANULE = border_memory.GRANULES["cuda"]


def test_a_gpu_has_each_unit_on_one_side_and_gives_all_back_after_a_failed_move(monkeypatch):
    monkeypatch.setattr(border_memory, "_Driver", BookedDriver)
    monkeypatch.setattr(torch, "as_tensor", lambda at, **_: torch.empty(at.size, dtype=torch.uint8))
    for name in ("synchronize", "Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    unit = BorderUnit.of(2, GRANULE // 4, "cuda")
    memory = CudaBorderMemory(unit, torch.device("cuda", 0))
    memory.allocate_arena(1, 3)
    memory.allocate_kv(3, 3)
    driver = memory._driver
    arena, kv = (range(begin, begin + size, GRANULE) for begin, size in driver.ranges.items())
    memory.move(MoveUnit(0, False, 1, 2))()
    assert sorted(driver.at) == [*arena[:4], *kv[:2], *kv[3:5]]
    memory.move(MoveUnit(1, True, 1, 2))()
    assert sorted(driver.at) == [*arena[:2], *kv]
    driver.maps_left = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.move(MoveUnit(2, False, 1, 0))()
    memory.close()
    assert (driver.handles, driver.at, driver.ranges) == (set(), {}, {})


def test_the_border_stays_where_memory_cannot_move(
    refs, shelf, tiny_checkpoints, tmp_path, monkeypatch
):
    monkeypatch.setattr(assembly, "can_move", lambda _: False)
    moving = {"moving_border": True, "adapter_gpu_bytes": 1 << 20}
    engine = build(tiny_checkpoints["llama"], shelf, tmp_path / "b", **SIZES, **moving)
    assert engine.status().border is None
    assert len(answers_of(engine, refs)) == REQUESTS
    engine.close()


def test_a_plan_counts_whole_units_and_what_adapters_may_borrow(config, tmp_path):
    engine = assembly.EngineSettings(tmp_path, tmp_path, kv_bytes=8 << 20, max_context=96)
    config = replace(config, max_context=96)
    fixed = plan_memory(config, 0, engine, 1 << 30)
    moving = plan_memory(config, 0, replace(engine, moving_border=True), 1 << 30)
    unit = BorderUnit.of(2 * config.shape.layers, fixed.kv_of_longest // 6 // 4, "cpu")
    assert unit.bytes == 4 * (64 << 10)
    assert (fixed.lendable, moving.lendable) == (0, 3 * (8 << 20) // 4)
    assert moving.slot_pool % unit.bytes == moving.kv % unit.bytes == 0
    assert moving.slot_pool >= fixed.slot_pool


def test_withdrawn_pages_leave_the_cache_and_go_once_nobody_has_them():
    pool = PagePool(6)
    pages = pool.take(4)
    for page in pages:
        pool.publish(page, bytes([page]))
    pool.release(pages[:2])
    pool.withdraw(range(3))
    assert (pool.pages, pool.free, pool.used) == (4, 2, 2)
    assert pool.find([bytes([pages[0]])]) == []
    assert pool.find([bytes([pages[3]])]) == [pages[3]]
    pool.publish(pages[2], b"later")
    assert pool.find([b"later"]) == [], "a withdrawn page is shared"
    pool.release(pages[2:])
    assert (pool.pages, pool.free, pool.referenced(range(3))) == (3, 3, 0)
    assert sorted(pool.take(3)) == [3, 4, 5]
    pool.restore(range(3))
    assert (pool.pages, pool.free) == (6, 3)
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_preemption_frees_neither_shared_nor_withdrawn_pages():
    pool, dropped = PagePool(6), Counter[int]()
    pages = pool.take(4)
    for page in pages[:2]:
        pool.publish(page, bytes([page]))
    pool.share(pages[:2])
    pool.withdraw(pages[3:])
    assert pool.freed_by(pages, dropped) == 1
    assert pool.freed_by(pages[:2], dropped) == 2, "nobody else has them"
    pool.release(pages)
    pool.release(pages[:2])
    assert pool.free == 2 + 1 + 2
