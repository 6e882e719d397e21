"""The adapters' memory on the device: images, the table, and the streams that change them.

    arena  | slot 2, layers 0–31 | slot 5, 0–8 | slot 0, 0–31 | hole | slot 5, 9–31 |    hole    |
    table  [slot, layer, module] → offsets of A and B in the arena, and the rank; of vectors
    members [slot] → the slot itself, or the slots of a composition's adapters

slots.py computes the places of images; this module writes and moves the images. Copies from the
host run on a stream of their own:

    computing   step · rows of the table · step · images that move · step
    copying            │ image                  │           image
                       └ waits for ReadsEnd     └ Compact: each waits for the other

Steps and copies share the arena's memory only. Steps (also replayed graphs, which join their side
streams before they end), writes to the table and moves of images are all on the computing stream,
so they are ordered: a step in flight reads the table's rows as they were at its launch, even if its
slots were reused since. Three cases need care:

1. A copy overwrites an evicted image. Only steps launched during that image's leases can read it.
   So the end of the last lease records an event (ReadsEnd), and the eviction makes the copying
   stream wait for the event (ClearRow). By then the event has usually completed, and the copy
   begins at once.
2. Images move. The moves begin after all earlier copies have ended, including the parts of paced
   copies (image_copies.py), and later copies begin after all moves.
3. A step reads a copied image. The step is launched after the adapter was leased, and that is after
   a thread has waited for the copy's event. So no step ever waits for a copy.

Checksums are safe: the checksum of a copy follows it on the copying stream. Periodic checksums
(image_checks.py) run on the computing stream; a checksum that overlaps a copy is ignored, since its
adapter was evicted.

The arena is allocated once and outlives every copy, so torch's allocator, which does not know the
copying stream, never reuses its memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.adapter import MAX_MEMBERS
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.checksums import word_sum
from lorikeet_engine.residency.gpu.image_copies import ImageCopy, PacedCopy, sum_of

MAX_COMPOSITIONS = 128
"""Largest number of different compositions that are leased at once."""
# Elements of the buffer for moves whose ranges overlap.
_MOVE_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an adapter's packed image in the arena (GPU memory for adapters): elements `begin` to
    `end` of the image.

    offset: offset of the part in the arena.
    """

    offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Command to write the place of an adapter's packed image into the table of adapters.

    slot: the adapter's slot, which is its row in the table.
    row: [layers + 1, modules, 3] int64: offsets of A and B in the arena
        (GPU memory for adapters), and the LoRA rank.
    vectors: [layers + 1, modules] int64: offsets of the linears' vectors in the arena, −1 for none;
        None: the adapter has no vectors.
    """

    slot: int
    row: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class WriteMembers:
    """Command to write the slots and weights of the adapters that a composition adds up.

    slot: the composition's slot.
    members, weights: slot and weight of each adapter.
    """

    slot: int
    members: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReadsEnd:
    """Command to record that the steps launched so far are the last to read the adapter's image in
    a slot.
    """

    slot: int


@dataclass(frozen=True, slots=True)
class ClearRow:
    """Command to clear a freed slot's row of the table: rank 0 everywhere, and no vectors.

    Copies that follow begin only after the steps that may still read the evicted adapter.
    """

    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """Move of elements in the arena (GPU memory for adapters) from `source` down to `target`; the
    two ranges may overlap.
    """

    source: int
    target: int
    elements: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Command to move adapters' packed images in the arena, in the given order, and to rewrite
    their table rows.
    """

    moves: tuple[Move, ...]
    rows: tuple[WriteRow, ...]


Command = WriteRow | WriteMembers | ReadsEnd | ClearRow | Compact
"""Command to an arena.

Contains no tensors, so that other processes with arenas of the same layout can repeat it.
"""


class DeviceArena:
    """The adapters' memory on one device. For the engine's thread only.

    Commands and copies take effect in the order of the calls. On a CPU, each call returns when all
    is done.
    """

    def __init__(self, weights: LoraWeights, device: torch.device) -> None:
        """Start with an empty arena.

        weights: on the device, the adapters' weights and the table of where each adapter's lie.
        """
        self.weights = weights
        self._copying: torch.cuda.Stream | None = None
        self._copies: list[PacedCopy] = []  # paced copies with parts still to launch
        self._reads: dict[int, torch.cuda.Event] = {}  # by slot, of images without a lease
        self._with_vectors = set[int]()  # slots
        if device.type == "cuda":
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            word_sum(weights.table)  # loads the kernel now, not during requests

    def run(self, *commands: Command) -> None:
        """Run commands in order.

        Steps launched afterwards see the changed arena and table of adapters.
        """
        for command in commands:
            self._run(command)

    def copy(self, image: torch.Tensor, pieces: Sequence[Piece]) -> ImageCopy:
        """Copy an adapter's packed image from the host to the arena, and compute its checksum
        there.

        pieces: places of the image's parts in the arena.
        """
        blocks = self.blocks(pieces)
        sources = torch.split(image, [block.numel() for block in blocks])
        if self._copying is None:
            for block, source in zip(blocks, sources, strict=True):
                block.copy_(source)
            return ImageCopy(sum_of(blocks), None)
        copy = PacedCopy(self._copying, blocks, sources)
        self._copies = [each for each in self._copies if not each.launched]
        if not self._copies:  # otherwise the waiting thread starts it when those are over
            copy.start()
        self._copies.append(copy)
        return ImageCopy(copy, copy)

    def blocks(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return views of the pieces of an adapter's image in the arena, valid until the image is
        moved.
        """
        return [self.weights.arena[p.offset : p.offset + p.end - p.begin] for p in pieces]

    def _run(self, command: Command) -> None:
        table, places = self.weights.table, self.weights.vectors
        match command:
            case WriteRow(slot, row, vectors):
                table[slot].copy_(upload(row, table.device))
                if vectors is not None:
                    assert places is not None, "vectors without a table of them"
                    places[slot].copy_(upload(vectors, table.device))
                    self._with_vectors.add(slot)
            case WriteMembers(slot, members, member_weights):
                self._write_members(slot, members, member_weights)
            case ReadsEnd(slot):
                self._note_reads(slot)
            case ClearRow(slot):
                table[slot].zero_()
                if places is not None and slot in self._with_vectors:
                    places[slot].fill_(-1)
                    self._with_vectors.remove(slot)
                if self._copying is not None and slot in self._reads:
                    self._copying.wait_event(self._reads.pop(slot))
            case Compact(moves, rows):
                with self._between_copies():
                    for move in moves:
                        self._move(move)
                    for written in rows:
                        self._run(written)

    def _write_members(
        self, slot: int, members: tuple[int, ...], weights: tuple[float, ...]
    ) -> None:
        of_slots, of_weights = self.weights.members, self.weights.member_weights
        assert of_slots is not None, "members without a table of them"
        assert of_weights is not None, "members without weights"
        unused = MAX_MEMBERS - len(members)
        slots = np.array([*members, *[-1] * unused], np.int32)
        each = np.array([*weights, *[0.0] * unused], np.float32)
        of_slots[slot].copy_(upload(slots, of_slots.device))
        of_weights[slot].copy_(upload(each, of_weights.device))

    def _note_reads(self, slot: int) -> None:
        if self._copying is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._copying.device))
            self._reads[slot] = event

    @contextmanager
    def _between_copies(self) -> Iterator[None]:
        """Run the block; its work on the device follows earlier copies and precedes later
        copies.
        """
        if self._copying is None:
            yield
            return
        for copy in self._copies:
            copy.launch_all()
        computing = torch.cuda.current_stream(self._copying.device)
        computing.wait_stream(self._copying)
        yield
        self._copying.wait_stream(computing)

    def _move(self, move: Move) -> None:
        arena, gap = self.weights.arena, move.source - move.target
        step = max(gap, _MOVE_ELEMENTS)
        for done in range(0, move.elements, step):
            part = arena[move.source + done : move.source + min(done + step, move.elements)]
            into = arena[move.target + done :][: part.numel()]
            into.copy_(part if part.numel() <= gap else part.clone())


def allocate_weights(
    shape: BaseShape,
    gpu_bytes: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None = None,
) -> LoraWeights:
    """Allocate an empty arena and empty tables for adapters.

    gpu_bytes: size of the arena, the GPU memory for adapters.
    slots: number of adapters that the table has rows for, besides MAX_COMPOSITIONS compositions.
    memory: bytes to use as the arena, of which not all need be there; None: allocate `gpu_bytes`.
    """
    slots += MAX_COMPOSITIONS
    table = slots, shape.layers + 1, len(shape.modules)
    members = torch.full((slots, MAX_MEMBERS), -1, dtype=torch.int32)
    members[:, 0] = torch.arange(slots)
    if memory is None:
        memory = torch.zeros(gpu_bytes // dtype.itemsize, dtype=dtype, device=device)
    return LoraWeights(
        memory.view(dtype),
        torch.zeros((*table, 3), dtype=torch.int64, device=device),
        torch.full(table, -1, dtype=torch.int64, device=device),
        members.to(device),
        torch.ones((slots, MAX_MEMBERS), dtype=torch.float32, device=device),
    )
