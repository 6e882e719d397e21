"""Order of streams: no step, copy or move ever sees a torn image."""

import random

import pytest
import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.checksums import layer_sums, word_sum
from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed
from lorikeet_engine.residency.gpu import image_copies
from lorikeet_engine.residency.gpu.adapters import GpuAdapters, LoadReason
from lorikeet_engine.residency.gpu.arena import (
    ClearRow,
    Compact,
    DeviceArena,
    Move,
    Piece,
    ReadsEnd,
)
from lorikeet_engine.residency.gpu.image_copies import ImageCopy
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.packed_image import PackedImage
from tests.engine.fake_streams import Streams
from tests.engine.residency.test_slots import layout_of

ARENA, LAYERS, SIZES = 640, 4, (16, 32, 48, 64)


class Engine:
    """GpuAdapters under asynchronous steps, each of which reads the images leased at its launch.

    A load is over when the host has waited for its event: as on a device, only waits and launches
    of the host order the streams.
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
        number = self.loads + 1
        ref = AdapterRef("acme", "a", 1, str(number))
        elements = torch.full((layout.elements,), float(number))
        image = PackedImage(layout, elements, layer_sums(elements, layout.layers))
        copy = self.adapters.place(ref, image, LoadReason.PIN)
        if copy is not None:
            self.loads = number
            self.copies[ref.digest] = copy

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


def set_part_bytes(monkeypatch, part_bytes: int) -> None:
    monkeypatch.setattr(image_copies, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(image_copies, "_AT_ONCE_BYTES", 0)


@pytest.fixture(params=[1 << 20, 64])
def part_bytes(request, monkeypatch):
    """Part sizes for copies: larger than an image, and a fraction of one."""
    set_part_bytes(monkeypatch, request.param)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("part_bytes")
def test_no_copy_overlaps_a_step_or_a_move(seed, monkeypatch):
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


def test_at_most_two_parts_of_an_image_are_in_flight(monkeypatch):
    set_part_bytes(monkeypatch, 64)
    engine = Engine(monkeypatch)
    first, second = torch.full((160,), 1.0), torch.full((96,), 2.0)

    def copied() -> int:
        return int(engine.weights.arena.count_nonzero())

    with engine.streams:
        copies = [
            engine.arena.copy(first, [Piece(0, 0, 40), Piece(320, 40, 160)]),
            engine.arena.copy(second, [Piece(64, 0, 96)]),
        ]
        assert copied() == 2 * 16, "of the first alone"
        copies[0].event.synchronize()
        assert copied() == 160
        copies[1].event.synchronize()
    assert [float(total.wait()) for total, _ in copies] == [
        float(word_sum(image)) for image in (first, second)
    ]
    assert engine.weights.arena[:40].eq(1).all()
    assert engine.weights.arena[320:440].eq(1).all()
    assert engine.weights.arena[64:160].eq(2).all()


def test_a_small_image_is_launched_at_once(monkeypatch):
    monkeypatch.setattr(image_copies, "_PART_BYTES", 64)
    engine = Engine(monkeypatch)
    with engine.streams:
        engine.arena.copy(torch.ones(160), [Piece(0, 0, 160)])
    assert int(engine.weights.arena.count_nonzero()) == 160


def test_images_move_after_all_parts_of_copies(monkeypatch):
    """A moved image may still be copied: its remaining parts are launched first."""
    set_part_bytes(monkeypatch, 64)
    engine = Engine(monkeypatch)
    image = torch.arange(1.0, 161.0)
    with engine.streams:
        copy = engine.arena.copy(image, [Piece(64, 0, 160)])
        engine.arena.run(Compact((Move(64, 0, 160),), ()))
        assert torch.equal(engine.weights.arena[:160], image)
        copy.event.synchronize()
    assert int(copy.total.wait()) == int(word_sum(image))


def test_a_copy_does_not_wait_for_steps_that_cannot_read_the_evicted_image(monkeypatch):
    """Two adapters come and go beside asynchronous steps with a third."""
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


def test_a_copy_waits_for_the_last_lease_of_the_evicted_adapter(monkeypatch):
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
def test_on_a_device_a_copy_overtakes_steps_but_waits_for_reads():
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
