"""Adapters are evicted, moved and loaded during a run, and every answer equals PEFT's.

On a CPU in float32, token for token. On a GPU in bfloat16, to float32_reference.TOLERANCE; some
steps and copies begin late there, so that a missing wait for one of them shows.
"""

import json
import random
from collections import Counter
from contextlib import closing
from itertools import combinations

import pytest
import torch

from lorikeet_engine.adapter import Residency
from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.residency.gpu.arena import DeviceArena
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.engine_driver import Answers, greedy, prompt
from tests.engine.fake_streams import Streams
from tests.engine.float32_reference import (
    ALL,
    TOLERANCE,
    Float32Reference,
    RecordingSampler,
    build,
    compare,
)

# Teeth stand between gaps and fill the arena. All gaps together hold BIG, but no single gap holds
# more than one of its four layers: with nothing else to evict, teeth must move for BIG.
TEETH = {
    "rank4_qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank16_v": {"r": 16, "lora_alpha": 32, "target_modules": ["v_proj"]},
    "rank8_ko": {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "o_proj"]},
    "rank2_all": {"r": 2, "lora_alpha": 4, "target_modules": ALL},
}
GAPS = {
    "rank6_all": {"r": 6, "lora_alpha": 12, "target_modules": ALL},
    "rank24_qv": {"r": 24, "lora_alpha": 24, "target_modules": ["q_proj", "v_proj"]},
    "rank32_rs": {
        "r": 32,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["k_proj", "o_proj"],
    },
}
SMALL, BIG, CUT = "rank4_vo", "rank16_all", "rank64_o"
ADAPTERS = {
    **TEETH,
    **GAPS,
    SMALL: {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "o_proj"]},
    BIG: {"r": 16, "lora_alpha": 16, "target_modules": ALL},
    "rank12_mlp": {"r": 12, "lora_alpha": 12, "target_modules": ["gate_proj", "down_proj"]},
    CUT: {"r": 64, "lora_alpha": 64, "target_modules": ["o_proj"]},
    "ranks_rs": {
        "r": 16,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "up_proj", "down_proj"],
        "rank_pattern": {r"layers\.1\.mlp\.down_proj": 4},
    },
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"q_proj": 32, r"layers\.1\.mlp\.down_proj": 4},
        "alpha_pattern": {"k_proj": 4, r"layers\.0\.mlp\.up_proj": 40},
    },
}
LENGTHS = (1, 5, 17, 63, 133)
LATE = (0, 0, 2_000_000, 8_000_000)  # cycles of a GPU's clock; some two million are a millisecond


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    # smaller models' answers to these adapters lie too near to each other
    return Float32Reference("llama", folder, request.param, ADAPTERS, on_cpu={})


@pytest.mark.parametrize("reference", ["cpu"], indirect=True)
def test_answers_on_a_cpu_equal_pefts_token_for_token(reference, tmp_path, monkeypatch):
    torch.set_num_threads(1)  # two threads would mostly wait for each other over tensors this small
    with closing(engine_of(reference, tmp_path, torch.float32)) as engine:
        watch_streams(engine, monkeypatch)
        assert churn(reference, engine, tolerance=2e-5) == 1.0, "two logits are too near"


@pytest.mark.gpu
@pytest.mark.parametrize("reference", ["cuda"], indirect=True)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no_graphs"])
def test_answers_on_a_gpu_equal_pefts_within_the_tolerance(reference, graphs, tmp_path):
    with closing(engine_of(reference, tmp_path, torch.bfloat16)) as engine:
        assert engine._runner._graphs is not None
        if not graphs:
            engine._runner._graphs = None
        begin_late(engine)
        assert churn(reference, engine, tolerance=TOLERANCE) > 0.5, "too few tokens are compared"


@pytest.mark.parametrize("reference", ["cpu"], indirect=True)
def test_all_adapters_answer_differently(reference):
    said = [reference.logprobs(name, prompt(63)) for name in (None, *ADAPTERS)]
    errors = [(one - two).square().mean().sqrt() for one, two in combinations(said, 2)]
    assert min(errors) > 3 * TOLERANCE


def engine_of(reference, folder, dtype):
    """Engine with space for a third of the adapters on the device, and for half on the host."""
    sizes = {
        "adapter_gpu_bytes": elements(reference, [*TEETH, *GAPS]) * dtype.itemsize,
        "adapter_host_bytes": elements(reference, ADAPTERS) * dtype.itemsize // 2,
        "max_running": 8,
        "max_batch_adapters": 8,
        "max_batch_tokens": 128,
    }
    name = str(dtype).removeprefix("torch.")
    return build(reference, folder, dtype=name, adapter_dtype=name, **sizes)


def elements(reference, names):
    """Number of elements of these adapters' images together."""
    shape = BaseShape.from_config(json.loads((reference.checkpoint / "config.json").read_text()))
    limits = AdapterLimits(max_rank=64, max_bytes=1 << 30)
    blobs = [reference.shelf.folder / reference.refs[name].digest for name in names]
    return sum(PackedLayout.of(read_spec(b, shape, limits), shape).elements for b in blobs)


def watch_streams(engine, monkeypatch):
    """Give copies a stream of their own; check that no access races with a step's."""
    tiers, runner = engine._tiers, engine._runner
    advance, forward = tiers.advance, runner.forward
    streams = Streams(tiers.weights.arena, copy_s=0.01)
    streams.stand_in(monkeypatch)
    tiers._gpu._arena = DeviceArena(tiers.weights, torch.device("cuda"))

    def copy_and_move():
        with streams:
            advance()

    def read(batch, scores):
        for slot in batch.segments.slots.tolist() if batch.segments else ():
            for block in tiers.arena.blocks(tiers._pool.placed()[slot].pieces):
                streams.access(block, writes=False)
        return forward(batch, scores)

    tiers.advance, runner.forward = copy_and_move, read


def begin_late(engine):
    """Make the GPU begin some steps and copies later than it could."""
    chance, runner, arena = random.Random(5), engine._runner, engine._tiers.arena
    forward, copy = runner.forward, arena.copy

    def forward_late(batch, scores):
        torch.cuda._sleep(chance.choice(LATE))
        return forward(batch, scores)

    def copy_late(*arguments):
        with torch.cuda.stream(arena._copying):
            torch.cuda._sleep(chance.choice(LATE))
        return copy(*arguments)

    runner.forward, arena.copy = forward_late, copy_late


class Churn(Answers):
    """Run of requests, and the changes to adapters in steps that began with another in flight.

    asked: each request with its adapter's name.
    loaded: number of loads, by the farthest tier that the adapter had fallen to.
    pieces: number of pieces of each placed image.
    moved: number of moves of images that requests held.
    """

    def __init__(self, engine, reference):
        super().__init__(engine)
        self.asked = []
        self.loaded = Counter()
        self.pieces = []
        self.evicted = self.moved = 0
        self._refs = reference.refs
        self._fallen = dict.fromkeys(ADAPTERS, Residency.REMOTE)

    def ask(self, name, length, tokens):
        i = len(self.asked)
        more = {"adapter": self._refs[name], "max_tokens": tokens, "seed": i}
        self.asked.append((greedy(f"r{i}", prompt(length, i), **more), name))
        self.submit(self.asked[-1][0])

    def at(self, name):
        return self.engine.residency(self._refs[name])

    def load(self, name, tier):
        self.engine.pin(self._refs[name], tier)
        self.until(lambda: self.at(name) is tier)

    def unpin(self, *names):
        for name in names:
            self.engine.unpin(self._refs[name].digest)

    def step(self):
        in_flight, before = self.engine._in_flight is not None, self._images()
        super().step()
        after = self._images()
        for name in ADAPTERS:
            if name in before.keys() - after.keys():
                self.evicted += in_flight
                self._fallen[name] = self.at(name)
            elif name in after.keys() - before.keys():
                self.loaded[self._fallen[name]] += in_flight
                self.pieces.append(len(after[name][1]))
            elif name in after:
                leases, places = before[name]
                self.moved += in_flight and leases > 0 and places != after[name][1]
            else:
                self._fallen[name] = min(self.at(name), self._fallen[name])

    def _images(self):
        """Leases of each adapter on the device, and the offsets of its image's pieces."""
        tiers = self.engine._tiers
        placed = tiers._pool.placed()
        return {
            one.ref.name: (one.leases, [piece.offset for piece in placed[one.slot].pieces])
            for one in tiers._gpu.snapshot()
        }


def churn(reference, engine, tolerance):
    """Run all traffic; return the share of tokens for which the reference has a clear verdict."""
    sampler, run = RecordingSampler(engine), Churn(engine, reference)
    make_teeth_move(run)
    let_adapters_come_and_go(run)
    assert not run.errors
    assert not any(tier.checksum_failures for tier in engine.status().tiers.values())
    assert min(run.loaded[Residency.HOST], run.loaded[Residency.DISK]) >= 2
    assert run.evicted > len(ADAPTERS)
    clear = [compare(reference, call, name, sampler, run, tolerance) for call, name in run.asked]
    return sum(clear) / len(clear)


def make_teeth_move(run):
    for name in (SMALL, BIG):
        run.load(name, Residency.HOST)
    teeth, gaps = iter(TEETH), iter(GAPS)
    for names in (teeth, gaps, teeth, gaps, teeth, gaps, teeth):
        run.load(next(names), Residency.GPU)
    run.unpin(*GAPS)
    run.ask(None, 17, 60)
    run.ask(CUT, 9, 5)
    run.until(lambda: run.asked[-1][0].request_id not in run.pending, timeout_s=120)
    assert run.pieces[-1] == 2, "no gap takes all of it"
    for name in TEETH:
        run.ask(name, 17, 40)
    run.until(lambda: len(run.tokens) == len(run.asked), timeout_s=120)
    run.ask(SMALL, 9, 10)  # placed in the same step as BIG: moves while it is being copied
    run.ask(BIG, 9, 10)
    run.until(lambda: run.at(BIG) is Residency.GPU)
    assert run.moved >= 2, "teeth that requests held had to move"
    run.unpin(SMALL, BIG, *TEETH)


def let_adapters_come_and_go(run):
    for name in (CUT, *GAPS):  # evicted just before, so some of them are still on the host
        run.ask(name, 5, 10)
    chance, names = random.Random(3), 2 * list(ADAPTERS)
    for i in range(40):
        run.until(lambda: len(run.pending) < 10, timeout_s=120)
        popular = names[i // 4 % len(ADAPTERS) :][:6]
        run.ask(chance.choice((None, *popular)), chance.choice(LENGTHS), chance.randint(1, 24))
    run.until(lambda: not run.pending, timeout_s=120)
