"""Memory that moves between adapters and KV pages of a GPU, beside steps and under graphs."""

import itertools
import random
import threading
import time

import pytest
import torch

from lorikeet_engine.device.border_memory import BorderUnit, MoveUnit, border_memory, can_move
from lorikeet_engine.execution import border
from lorikeet_engine.scheduling.border_policy import BorderPolicy
from tests.engine.engine_driver import Answers, greedy, load_adapters, nothing_is_held, prompt
from tests.engine.float32_reference import (
    NAMES,
    Float32Reference,
    RecordingSampler,
    build,
    compare,
    run_to_end,
)

pytestmark = pytest.mark.gpu

ROWS, ARENA, MOST, KV = 6, 2, 5, 4
UNIT = BorderUnit.of(ROWS, 32 << 10, "cuda")


@pytest.fixture
def memory():
    device = torch.device("cuda", torch.cuda.current_device())
    assert can_move(device), "the driver maps no memory"
    memory = border_memory(UNIT, device)
    yield memory
    memory.close()


def arena_unit(arena, unit):
    return arena[unit * UNIT.bytes :][: UNIT.bytes]


def kv_unit(kv, unit):
    return kv[:, unit * UNIT.row_bytes :][:, : UNIT.row_bytes]


def move(memory, *, to_kv, arena, kv):
    memory.move(MoveUnit(0, to_kv, arena, kv))()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_addresses_take_no_memory_and_a_closed_memory_gives_its_units_back(memory):
    memory.allocate_arena(1, 2)
    memory.close()  # the driver keeps memory of its own from the first use on
    for _ in range(2):
        free = free_bytes()
        memory.allocate_arena(40, 400)
        memory.allocate_kv(10, 100)
        taken = free - free_bytes()
        assert abs(taken - 50 * UNIT.bytes) < 10 * UNIT.bytes
        memory.close()
        assert abs(free - free_bytes()) < 10 * UNIT.bytes


def test_units_move_and_what_stays_keeps_its_contents(memory):
    arena, kv = memory.allocate_arena(ARENA, MOST), memory.allocate_kv(KV, KV)
    assert not arena[: ARENA * UNIT.bytes].any()
    for unit in range(KV):
        kv_unit(kv, unit).fill_(unit + 1)
    for unit in range(ARENA):
        arena_unit(arena, unit).fill_(unit + 101)
    for turn in range(20):
        move(memory, to_kv=False, arena=ARENA, kv=1)
        move(memory, to_kv=False, arena=ARENA + 1, kv=3)
        arena_unit(arena, ARENA).fill_(turn)
        arena_unit(arena, ARENA + 1).fill_(turn + 1)
        across = arena[(ARENA + 1) * UNIT.bytes - 8 :][:16].tolist()  # a copy over the seam
        assert across == [turn] * 8 + [turn + 1] * 8
        move(memory, to_kv=True, arena=ARENA + 1, kv=1)
        move(memory, to_kv=True, arena=ARENA, kv=3)
        assert not kv_unit(kv, 1).any()
        assert not kv_unit(kv, 3).any()
        kv_unit(kv, 1).fill_(7)
        if not turn:  # kernels are loaded
            free = free_bytes()
    assert free - free_bytes() < UNIT.bytes, "moves take memory"
    kept = (kv_unit(kv, 0), 1), (kv_unit(kv, 2), 3), (arena[: UNIT.bytes], 101)
    for memory_of, value in (*kept, (arena_unit(arena, 1), 102)):
        assert bool((memory_of == value).all())


def test_a_graph_replays_over_memory_that_has_moved(memory):
    arena, kv = memory.allocate_arena(ARENA, MOST), memory.allocate_kv(KV, KV)
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    at = torch.arange(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            found = arena[offset + at].long() + kv[0, at].long()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = arena[offset + at].long() + kv[0, at].long()
    for turn in range(10):
        move(memory, to_kv=False, arena=ARENA, kv=2)
        arena_unit(arena, ARENA).fill_(turn)
        kv_unit(kv, 0).fill_(100)
        offset.fill_(ARENA * UNIT.bytes)
        graph.replay()
        assert found.tolist() == [100 + turn] * 64
        offset.zero_()
        move(memory, to_kv=True, arena=ARENA, kv=2)
        graph.replay()
        assert found.tolist() == [100] * 64


def test_a_move_waits_for_steps_before_it_and_no_step_waits_for_a_move(memory):
    memory.allocate_arena(ARENA, MOST)
    kv = memory.allocate_kv(KV, KV)
    kv_unit(kv, 1).fill_(9)
    _ = kv_unit(kv, 1).sum(dtype=torch.int64), torch.ones(8, device="cuda") * 2  # loads kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # some 0.1 s
    read = kv_unit(kv, 1).sum(dtype=torch.int64)
    run = memory.move(MoveUnit(0, False, ARENA, 1))
    thread = threading.Thread(target=run)
    began_s = time.perf_counter()
    thread.start()
    other = torch.ones(8, device="cuda") * 2  # launched while the move waits
    launched_s = time.perf_counter() - began_s
    assert thread.is_alive(), "the memory moved before the step that reads it had ended"
    thread.join()
    assert launched_s < 0.05, "a launch waited for the move"
    assert int(read) == 9 * UNIT.bytes
    assert other.tolist() == [2.0] * 8


def test_gaps_between_graph_replays_while_memory_moves(memory, capsys):
    memory.allocate_arena(ARENA, MOST)
    memory.allocate_kv(KV, KV)
    weights = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        x @ weights
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(60):
            x @ weights
    over, moved = threading.Event(), []

    def keep_moving():
        for to_kv in itertools.cycle((False, True)):
            if over.is_set() and not to_kv:
                return
            began_s = time.perf_counter()
            move(memory, to_kv=to_kv, arena=ARENA, kv=1)
            moved.append(time.perf_counter() - began_s)
            time.sleep(0.01)

    def gaps_ms():
        ticks_s = []
        for _ in range(400):
            graph.replay()
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()
            ticks_s.append(time.perf_counter())
        return sorted(1e3 * (b - a) for a, b in itertools.pairwise(ticks_s))

    alone = gaps_ms()
    thread = threading.Thread(target=keep_moving)
    thread.start()
    beside = gaps_ms()
    over.set()
    thread.join()
    with capsys.disabled():
        print(
            f"\ngaps alone p50 {alone[200]:.3f} p99 {alone[395]:.3f} ms; while {len(moved)} units "
            f"of {UNIT.bytes >> 20} MiB move: p50 {beside[200]:.3f} p99 {beside[395]:.3f} ms; "
            f"a move: p50 {1e3 * sorted(moved)[len(moved) // 2]:.2f} ms"
        )
    assert len(moved) > 10
    assert beside[395] < alone[395] + 5.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Float32Reference("llama", tmp_path_factory.mktemp("llama"), "cuda")


@pytest.fixture(scope="module")
def engine(reference, tmp_path_factory):
    """Engine whose arena begins with one unit, and whose KV pages are 16 units."""
    sizes = {"kv_pages": 16 * 128, "max_context": 512, "max_running": 8, "max_batch_tokens": 64}
    sizes |= {"moving_border": True, "adapter_gpu_bytes": 1}
    engine = build(reference, tmp_path_factory.mktemp("cache"), **sizes)
    yield engine
    engine.close()


def test_answers_stay_the_same_while_memory_moves_in_every_step(reference, engine, monkeypatch):
    chance = random.Random(3)
    monkeypatch.setattr(border, "EVERY_S", 0.0)
    monkeypatch.setattr(BorderPolicy, "decide", lambda *_: chance.choice((3, 3, -3)))
    draws, answers = RecordingSampler(engine), Answers(engine)
    load_adapters(answers, reference.refs.values())
    asked = []
    for i in range(60):
        name = NAMES[i % len(NAMES)]
        more = {"adapter": reference.refs[name], "seed": 100 * i}
        asked.append((name, greedy(f"r{i}", prompt(20 + i, i), max_tokens=40, **more)))
        answers.submit(asked[-1][1])
    run_to_end(answers)
    moves = engine.status().border
    assert moves.to_adapters >= 5, moves
    assert moves.to_pages >= 5, moves
    for name, call in asked:
        assert len(answers.of(call.request_id)) == 40
        compare(reference, call, name, draws, answers)
    assert nothing_is_held(engine)
