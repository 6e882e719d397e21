"""The adapters' memory on the device: images, the table, and the streams that change them.

    arena  | slot 2, layers 0–31 | slot 5, 0–8 | slot 0, 0–31 | hole | slot 5, 9–31 |    hole    |
    table  [slot, layer, module] → where in the arena A and B begin, and the rank

What lies where is decided in numbers (slots.py); here it is done. Copies from the host
go on another stream than the one that computes:

    computing   step · rows of the table · step · images that move · step
    copying            │ image                  │           image
                       └ waits for ReadsEnd     └ Compact: each waits for the other

What steps read and what copies write meet in the arena alone. Steps (a replayed graph like any
other: what it does on side streams it joins before it ends), the table's rows and images that
move are on the computing stream and so in order among themselves: a step in flight reads the rows
as they were when it was launched, whatever has its slots by now. Three things remain to be seen to.

A copy overwrites what was evicted. Only steps launched while that was leased can read it, so the
end of its last lease leaves an event behind (ReadsEnd), which copies wait for once it is evicted
(ClearRow). By then the event is over, as a rule, and the copy begins at once, whatever computes.
The copying stream works in order: no later copy needs to wait for the same event again.

Images move. All copies so far end before, the parts included that were still to be given to the
device (image_copies.py), and no later one begins until all is moved.

A step reads what was copied. It is launched after the adapter was leased, and that is after
somebody has seen the copy's event over: no step ever waits for a copy.

Sums are no concern. Those of a copy follow it on its stream. Those that are taken now and then
(image_checks.py) are on the computing stream; one that meets a copy, since its adapter was evicted
meanwhile, is not looked at.

The arena is allocated once and outlives every copy, so the allocator, which knows nothing of the
copying stream, never hands its memory to others. The image is held on the host until the event.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.checksums import word_sum
from lorikeet_engine.residency.gpu.image_copies import ImageCopy, PacedCopy, sum_of

# An image that moves onto itself goes through a buffer of this many elements.
_MOVE_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `begin` to `end` of an image, which lie at `offset` of the arena."""

    offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Write where a slot's image lies. row [layers + 1, modules, 3] int64: the table's."""

    slot: int
    row: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadsEnd:
    """Say that no step from now on reads a slot's image, until this is said anew."""

    slot: int


@dataclass(frozen=True, slots=True)
class ClearRow:
    """Clear the row of a slot that has no image any more: rank 0 everywhere.

    No copy begins from now on until the steps are over that may read the image.
    """

    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """Move elements from `source` to `target`, which is before it; the two may overlap."""

    source: int
    target: int
    elements: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Move images, in this order, and say where they lie now."""

    moves: tuple[Move, ...]
    rows: tuple[WriteRow, ...]


Command = WriteRow | ReadsEnd | ClearRow | Compact
"""Plain data: another process with an arena of the same layout can run the same commands."""


class DeviceArena:
    """Runs commands and copies, in that order. Belongs to the engine's thread.

    On a CPU each call returns when all is done.
    """

    def __init__(self, weights: LoraWeights, device: torch.device) -> None:
        """weights: on the device."""
        self.weights = weights
        self._copying: torch.cuda.Stream | None = None
        self._copies: list[PacedCopy] = []  # of which the device does not have all parts
        self._reads: dict[int, torch.cuda.Event] = {}  # by slot; of those that may be evicted
        if device.type == "cuda":
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            word_sum(weights.table)  # its kernel is loaded now, not under requests

    def run(self, *commands: Command) -> None:
        """Run commands; steps launched from now on find the arena so."""
        for command in commands:
            self._run(command)

    def copy(self, image: torch.Tensor, pieces: Sequence[Piece]) -> ImageCopy:
        """Copy the image from the host to where its pieces lie, in turn, and add it up there."""
        blocks = self.blocks(pieces)
        sources = torch.split(image, [block.numel() for block in blocks])
        if self._copying is None:
            for block, source in zip(blocks, sources, strict=True):
                block.copy_(source)
            return ImageCopy(sum_of(blocks), None)
        copy = PacedCopy(self._copying, blocks, sources)
        self._copies = [each for each in self._copies if not each.given]
        if not self._copies:  # else it begins when those are over
            copy.start()
        self._copies.append(copy)
        return ImageCopy(copy, copy)

    def blocks(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Views of the arena that are an image end to end, while its pieces lie there."""
        return [self.weights.arena[p.offset : p.offset + p.end - p.begin] for p in pieces]

    def _run(self, command: Command) -> None:
        table = self.weights.table
        match command:
            case WriteRow(slot, row):
                table[slot].copy_(upload(row, table.device))
            case ReadsEnd(slot):
                self._note_reads(slot)
            case ClearRow(slot):
                table[slot].zero_()
                if self._copying is not None and slot in self._reads:
                    self._copying.wait_event(self._reads.pop(slot))
            case Compact(moves, rows):
                with self._between_copies():
                    for move in moves:
                        self._move(move)
                    for written in rows:
                        self._run(written)

    def _note_reads(self, slot: int) -> None:
        if self._copying is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._copying.device))
            self._reads[slot] = event

    @contextmanager
    def _between_copies(self) -> Iterator[None]:
        """Run the block after all copies so far, before all later ones."""
        if self._copying is None:
            yield
            return
        for copy in self._copies:
            copy.give_all()
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
    shape: BaseShape, gpu_bytes: int, slots: int, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Allocate an arena of this many bytes and a table of this many slots, without an adapter."""
    table = (slots, shape.layers + 1, len(shape.modules), 3)
    return LoraWeights(
        torch.zeros(gpu_bytes // dtype.itemsize, dtype=dtype, device=device),
        torch.zeros(table, dtype=torch.int64, device=device),
    )
