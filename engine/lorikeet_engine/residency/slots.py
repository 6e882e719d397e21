"""The slot pool: adapters' images side by side in one arena on the device.

    arena  | image of slot 2 | hole | image of slot 0 | image of slot 1 |       hole       |
    table  [slot, layer, linear] → where in the arena A and B begin, and the rank

A slot is a row of the table and stays the same while its image may move.
"""

import torch

from lorikeet_engine.copies import upload
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.blocks import FreeList
from lorikeet_engine.residency.packing import PackedLayout

# Moves go through a buffer of this many elements: a block may overlap where it goes.
_MOVE_ELEMENTS = 4 << 20


class SlotPool:
    """Places images, moves them together when holes are too small, keeps the table right.

    Belongs to the engine's thread; on a GPU, to the stream that computes.
    """

    def __init__(self, weights: LoraWeights) -> None:
        self.weights = weights
        self._blocks = FreeList(weights.arena.numel())
        self._free = list(range(weights.table.shape[0]))[::-1]
        self._placed: dict[int, tuple[int, PackedLayout]] = {}  # slot → (offset, layout)

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
        """Whether an image of this size can be placed, holes closed if need be."""
        return bool(self._free) and elements <= self._blocks.free

    def place(self, layout: PackedLayout) -> int:
        """A slot with a block of the image's size and its row in the table; its content is open.

        May move other images. Only where has_room says so.
        """
        assert self.has_room(layout.elements)
        offset = self._blocks.allocate(layout.elements)
        if offset is None:
            self.compact()
            offset = self._blocks.allocate(layout.elements)
        assert offset is not None
        slot = self._free.pop()
        self._put(slot, offset, layout)
        return slot

    def block(self, slot: int) -> torch.Tensor:
        """A view of the slot's image in the arena, valid until the next place or compact."""
        offset, layout = self._placed[slot]
        return self.weights.arena[offset : offset + layout.elements]

    def evict(self, slot: int) -> None:
        """Free the slot and its block; its row says rank 0 everywhere."""
        offset, layout = self._placed.pop(slot)
        self._blocks.release(offset, layout.elements)
        self._free.append(slot)
        self.weights.table[slot].zero_()

    def compact(self) -> None:
        """Slide all images to the arena's front. Slots stay, their rows change."""
        end = 0
        for slot, (offset, layout) in sorted(self._placed.items(), key=lambda item: item[1][0]):
            if offset != end:
                self._move(offset, end, layout.elements)
                self._put(slot, end, layout)
            end += layout.elements
        self._blocks.close_holes()

    def _put(self, slot: int, offset: int, layout: PackedLayout) -> None:
        self._placed[slot] = (offset, layout)
        table = self.weights.table
        table[slot].copy_(upload(layout.rows_at(offset), table.device))

    def _move(self, source: int, target: int, elements: int) -> None:
        arena = self.weights.arena
        for done in range(0, elements, _MOVE_ELEMENTS):
            count = min(_MOVE_ELEMENTS, elements - done)
            piece = arena[source + done : source + done + count].clone()
            arena[target + done : target + done + count] = piece
