"""The slot pool: adapters' images in one arena on the device.

    arena  | slot 2, layers 0–31 | slot 5, 0–8 | slot 0, 0–31 | hole | slot 5, 9–31 |    hole    |
    table  [slot, layer, linear] → where in the arena A and B begin, and the rank

An image lies in one piece where a hole takes it; otherwise it is cut between layers, and its pieces
fill the largest holes. Images move only where that does not do either. A slot is a row of the table
and stays the same while its image may move.
"""

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lorikeet_engine.copies import upload
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.blocks import FreeList
from lorikeet_engine.residency.packing import PackedLayout

# An image that moves onto itself goes through a buffer of this many elements.
_MOVE_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `begin` to `end` of an image, which lie at `offset` of the arena."""

    offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Placed:
    """An image in the arena."""

    layout: PackedLayout
    pieces: tuple[Piece, ...]


class SlotPool:
    """Places images, closes holes when they are too small, keeps the table right.

    Belongs to the engine's thread, but for `placed`; on a GPU, to the stream that computes.
    moved_elements: how much has been moved to close holes since the start.
    """

    def __init__(self, weights: LoraWeights) -> None:
        self.weights = weights
        self.moved_elements = 0
        self._blocks = FreeList(weights.arena.numel())
        self._free = list(range(weights.table.shape[0]))[::-1]
        self._placed: dict[int, Placed] = {}  # by slot; at no moment do any overlap

    @property
    def elements(self) -> int:
        """The arena's size."""
        return self._blocks.total

    @property
    def slots(self) -> int:
        """The table's rows."""
        return self.weights.table.shape[0]

    @property
    def used_elements(self) -> int:
        """What placed images occupy."""
        return self._blocks.total - self._blocks.free

    def has_room(self, elements: int) -> bool:
        """Whether an image of this size can be placed."""
        return bool(self._free) and elements <= self._blocks.free

    def fits(self, layout: PackedLayout) -> bool:
        """Whether place would leave the other images where they are."""
        return bool(self._free) and bool(self._cut(layout))

    def place(
        self, layout: PackedLayout, moving: Callable[[], AbstractContextManager[None]]
    ) -> int:
        """A slot with room for the image and its row in the table; its content is open.

        May move other images, inside of `moving`. Only where has_room says so.
        """
        assert self.has_room(layout.elements)
        ends = self._cut(layout)
        if not ends:
            with moving():
                self._gather(layout.elements)
            ends = [layout.elements]
        slot, pieces = self._free.pop(), list[Piece]()
        for begin, end in pairwise([0, *ends]):
            offset = self._blocks.allocate(end - begin)
            assert offset is not None
            pieces.append(Piece(offset, begin, end))
        self._placed[slot] = Placed(layout, tuple(pieces))
        self._write_row(slot)
        return slot

    def placed(self) -> dict[int, Placed]:
        """All images by slot, as they lie at one moment. For any thread; holds up none."""
        return self._placed.copy()

    def blocks(self, slot: int) -> list[torch.Tensor]:
        """Views of the arena that are the slot's image end to end, valid until the next place."""
        pieces = self._placed[slot].pieces
        return [self.weights.arena[p.offset : p.offset + p.end - p.begin] for p in pieces]

    def evict(self, slot: int) -> None:
        """Free the slot and its blocks; its row says rank 0 everywhere."""
        for piece in self._placed.pop(slot).pieces:
            self._blocks.release(piece.offset, piece.end - piece.begin)
        self._free.append(slot)
        self.weights.table[slot].zero_()

    def _cut(self, layout: PackedLayout) -> list[int]:
        """Where each piece ends, so that they fit into the largest holes; [] if they cannot."""
        layers, begin, ends = layout.layers, 0, list[int]()
        for hole in self._blocks.holes():
            if begin + hole >= layout.elements:
                return [*ends, layout.elements]
            end = layers[bisect_right(layers, begin + hole) - 1]
            if end == begin:
                break
            ends.append(end)
            begin = end
        return []

    def _gather(self, elements: int) -> None:
        """Slide what lies in one stretch to its front, until there is a hole of this size."""
        begin, end = self._blocks.cheapest_stretch(elements)
        inside = [
            (piece, slot)
            for slot, placed in self._placed.items()
            for piece in placed.pieces
            if begin <= piece.offset < end
        ]
        target = begin
        for piece, slot in sorted(inside, key=lambda item: item[0].offset):
            self._move(piece, target)
            self._placed[slot] = _with_moved(self._placed[slot], piece, target)
            target += piece.end - piece.begin
        self._blocks.close_holes(begin, end)
        for slot in {slot for _, slot in inside}:
            self._write_row(slot)

    def _move(self, piece: Piece, target: int) -> None:
        arena, source, elements = self.weights.arena, piece.offset, piece.end - piece.begin
        self.moved_elements += elements
        gap = source - target
        step = max(gap, _MOVE_ELEMENTS)
        for done in range(0, elements, step):
            part = arena[source + done : source + min(done + step, elements)]
            arena[target + done :][: part.numel()] = part if part.numel() <= gap else part.clone()

    def _write_row(self, slot: int) -> None:
        placed, table = self._placed[slot], self.weights.table
        begins = [piece.begin for piece in placed.pieces]
        holders = [placed.pieces[bisect_right(begins, at) - 1] for at in placed.layout.layers]
        offsets = torch.tensor([piece.offset - piece.begin for piece in holders])
        table[slot].copy_(upload(placed.layout.rows_at(offsets[:, None, None]), table.device))


def _with_moved(placed: Placed, moved: Piece, target: int) -> Placed:
    pieces = (replace(p, offset=target) if p is moved else p for p in placed.pieces)
    return replace(placed, pieces=tuple(pieces))
