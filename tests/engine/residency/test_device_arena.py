"""The streams' order: whatever is loaded, leased, evicted and moved, nobody reads a torn image."""

import random

import pytest
import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.checksums import layer_sums
from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed
from lorikeet_engine.residency.gpu.adapters import GpuAdapters
from lorikeet_engine.residency.gpu.arena import ClearRow, DeviceArena, ImageCopy, Piece, ReadsEnd
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.packing import PackedImage
from tests.engine.fake_streams import Streams
from tests.engine.residency.test_slots import layout_of

ARENA, LAYERS, SIZES = 640, 4, (16, 32, 48, 64)


class Engine:
    """GpuAdapters under steps that nobody waits for; each reads what is leased when it is launched.

    Loads arrive when the host has waited for their events: only the host's waiting and launching
    order the streams, as on a device.
    """

    def __init__(self, monkeypatch) -> None:
        table = torch.zeros(12, LAYERS, 7, 3, dtype=torch.int64)
        self.weights = LoraWeights(torch.zeros(ARENA), table)
        self.pool = SlotPool(ARENA, 12)
        self.streams = streams = Streams(self.weights.arena)
        streams.stand_in(monkeypatch)
        self.arena = DeviceArena(self.weights, torch.device("cuda"))
        self.adapters = GpuAdapters(
            self.pool, self.arena, LeastRecentlyUsed(), lambda: float(self.now)
        )
        self.now = self.loads = 0
        self.copies: dict[str, ImageCopy] = {}
        self.leases = {}

    def load(self, chance: random.Random) -> None:
        layout = layout_of(*[chance.choice(SIZES) for _ in range(LAYERS)])
        if self.adapters.make_room(layout.elements, for_request=True):
            self.loads += 1
            ref = AdapterRef("acme", "a", 1, str(self.loads))
            elements = torch.full((layout.elements,), float(self.loads))
            image = PackedImage(layout, elements, layer_sums(elements, layout.layers))
            self.copies[ref.digest] = self.adapters.place(ref, image, requested=False)

    def arrive(self, digest: str) -> None:
        copy = self.copies.pop(digest)
        assert copy.event is not None
        copy.event.synchronize()
        assert self.adapters.copy_finished(digest, int(copy.total.wait()))

    def step(self) -> None:
        for digest, lease in self.leases.items():
            for block in self.arena.blocks(self.pool.placed()[lease.slot].pieces):
                assert block.eq(int(digest)).all()
                self.streams.access(block, writes=False)


@pytest.mark.parametrize("seed", range(8))
def test_no_copy_meets_a_step_or_a_move(seed, monkeypatch):
    chance, engine = random.Random(seed), Engine(monkeypatch)
    with engine.streams:
        for engine.now in range(400):
            match chance.choice(["load", "load", "arrive", "lease", "release", "step", "step"]):
                case "load":
                    engine.load(chance)
                case "arrive" if engine.copies:
                    engine.arrive(next(iter(engine.copies)))
                case "lease":
                    digest = str(chance.randint(1, engine.loads + 1))
                    lease = digest not in engine.leases and engine.adapters.lease(digest)
                    if lease:
                        engine.leases[digest] = lease
                case "release" if engine.leases:
                    engine.leases.pop(chance.choice(list(engine.leases))).release()
                case "step":
                    engine.step()
    assert engine.loads > 40
    assert engine.pool.moved_elements


def test_a_copy_waits_for_no_step_that_cannot_read_what_it_overwrites(monkeypatch):
    """Two adapters come and go beside a third's steps, which are not waited for."""
    chance, engine = random.Random(1), Engine(monkeypatch)
    streams = engine.streams
    with streams:
        engine.load(chance)
        engine.arrive("1")
        engine.leases["1"] = engine.adapters.lease("1")
        launched = []
        for digest in map(str, range(2, 12)):
            engine.step()
            launched.append(streams.computing.clock["computing"])
            engine.load(chance)
            waited = streams.copying.clock["computing"]
            assert waited < launched[-1]
            engine.arrive(digest)
            engine.leases[digest] = engine.adapters.lease(digest)
            engine.step()
            engine.leases.pop(digest).release()
    assert len(engine.adapters.snapshot()) < 11, "some were evicted"
    assert waited >= launched[0], "and with them those of the steps were waited for"


def test_a_copy_waits_for_the_last_of_an_adapters_leases(monkeypatch):
    chance, engine = random.Random(1), Engine(monkeypatch)
    with engine.streams:
        engine.load(chance)
        engine.arrive("1")
        for _ in range(2):
            engine.leases["1"] = engine.adapters.lease("1")
            engine.step()
            engine.leases.pop("1").release()
        while engine.adapters.placed("1"):
            engine.load(chance)


@pytest.mark.gpu
def test_on_a_device_a_copy_passes_steps_and_waits_for_reads():
    image, size = torch.arange(1 << 22).pin_memory(), 1 << 22
    memory = torch.zeros(2 << 22, dtype=torch.int64, device="cuda")
    table = torch.zeros(1, dtype=torch.int64, device="cuda")
    arena = DeviceArena(LoraWeights(memory, table), torch.device("cuda"))
    step = torch.cuda.current_stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # cycles, so about half a second
    arena.copy(image, [Piece(0, 0, size)]).event.synchronize()
    assert not step.query(), "the copy is over and the step is not"
    arena.run(ReadsEnd(0), ClearRow(0))
    arena.copy(image, [Piece(size, 0, size)]).event.synchronize()
    assert step.query(), "the copy began when the step was over"
    assert torch.equal(memory.cpu(), torch.cat([image, image]))
