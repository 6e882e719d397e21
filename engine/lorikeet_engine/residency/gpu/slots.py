"""Slot pool: computes the places of images in the device's arena.

An image lies in one piece if a hole fits it; otherwise it is split between layers, and its pieces
fill the largest holes. Only if that fails are other images moved. A slot is a row of the table of
adapters, and stays the same while its image moves.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lorikeet_engine.residency.free_list import FreeList
from lorikeet_engine.residency.gpu.arena import (
    ClearRow,
    Command,
    Compact,
    Move,
    Piece,
    WriteRow,
)
from lorikeet_engine.residency.packed_image import PackedLayout


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Layout of an adapter's packed image, and its place in the arena (GPU memory for adapters)."""

    layout: PackedLayout
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SlotAllocation:
    """A slot and a place in the arena, allocated for an adapter's packed image that is not copied
    yet.

    pieces: places of the image's parts.
    commands: commands for the arena, to run before the image is copied.
    """

    slot: int
    pieces: tuple[Piece, ...]
    commands: tuple[Command, ...]


class SlotPool:
    """Fixed number of GPU slots for adapters' packed images of any size.

    Computes places, and moves images if free blocks are too small; a DeviceArena runs the resulting
    commands. For the engine's thread only, except `placed`.

    elements: size of the arena now.
    least: size of the arena at the start; it never becomes smaller.
    slots: number of slots, which are rows of the table of adapters.
    moved_elements: number of elements that compactions have moved since the start.
    """

    def __init__(self, elements: int, slots: int) -> None:
        self.elements = self.least = elements
        self.slots = slots
        self.moved_elements = 0
        self._blocks = FreeList(elements)
        self._free = list(range(slots))[::-1]
        self._placed: dict[int, PlacedImage] = {}  # by slot; at no moment do any overlap

    @property
    def used_elements(self) -> int:
        """Number of elements of the arena that adapters' images occupy."""
        return self.elements - self._blocks.free

    def can_place(self, elements: int) -> bool:
        """Whether a slot is free, and enough elements for a packed adapter of this size."""
        return bool(self._free) and elements <= self._blocks.free

    def fits(self, layout: PackedLayout) -> bool:
        """Whether an adapter of this layout can be placed without moving others."""
        return bool(self._free) and bool(self._split(layout))

    def place(self, layout: PackedLayout) -> SlotAllocation:
        """Allocate a slot and a place for an adapter's packed image, moving other images if
        necessary.

        Requires that `can_place` returns True for the image's size.
        """
        assert self.can_place(layout.elements)
        commands, ends = list[Command](), self._split(layout)
        if not ends:
            commands.append(self._compact(layout.elements))
            ends = [layout.elements]
        slot, pieces = self._free.pop(), list[Piece]()
        for begin, end in pairwise([0, *ends]):
            offset = self._blocks.allocate(end - begin)
            assert offset is not None
            pieces.append(Piece(offset, begin, end))
        placed = self._placed[slot] = PlacedImage(layout, tuple(pieces))
        return SlotAllocation(slot, placed.pieces, (*commands, self._row(slot)))

    def extend(self, elements: int) -> None:
        """Add elements to the arena's end."""
        self.elements += elements
        self._blocks.extend(elements)

    def cut(self, elements: int) -> Compact | None:
        """Take elements from the arena's end; return the command that moves the images out of them.

        Returns None, and changes nothing, if a part of an image fits no hole before the new end.
        """
        blocks = self._blocks.copy()
        targets = self._targets(blocks, elements, self._placed)
        if targets is None:
            return None
        moves, slots = list[Move](), dict[int, PlacedImage]()
        for piece, slot, target in targets:
            moves.append(Move(piece.offset, target, piece.end - piece.begin))
            slots[slot] = _with_moved(slots.get(slot, self._placed[slot]), piece, target)
        self._placed |= slots
        self._blocks = blocks
        self.elements -= elements
        self.moved_elements += sum(move.elements for move in moves)
        return Compact(tuple(moves), tuple(map(self._row, slots)))

    def could_cut(self, elements: int, freed: Collection[int]) -> bool:
        """Whether `cut` would succeed if these slots were free."""
        blocks, left = self._blocks.copy(), dict[int, PlacedImage]()
        for slot, placed in self._placed.items():
            if slot not in freed:
                left[slot] = placed
                continue
            for piece in placed.pieces:
                blocks.release(piece.offset, piece.end - piece.begin)
        return self._targets(blocks, elements, left) is not None

    def behind(self, elements: int) -> set[int]:
        """Return the slots of images of which a part lies in the arena's last elements."""
        end = self.elements - elements
        return {slot for slot, placed in self._placed.items() if _pieces_behind(placed, end)}

    def placed(self) -> dict[int, PlacedImage]:
        """Return a snapshot of all adapters' images in the arena, by slot. For any thread, without
        a lock.
        """
        return self._placed.copy()

    def image(self, slot: int) -> PlacedImage | None:
        """Return the adapter's image in a slot; None if the slot is free.

        Each move or replacement of the image makes a new object, so `is` tells whether it has
        changed.
        """
        return self._placed.get(slot)

    def free(self, slot: int) -> ClearRow:
        """Free a slot and its adapter's place; return the command that clears the slot's row."""
        for piece in self._placed.pop(slot).pieces:
            self._blocks.release(piece.offset, piece.end - piece.begin)
        self._free.append(slot)
        return ClearRow(slot)

    def _split(self, layout: PackedLayout) -> list[int]:
        """Split an adapter's packed image between layers so that its pieces fit into the largest
        holes.

        Returns the element of the image at which each piece ends; [] if no such split fits.
        """
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

    def _targets(
        self, blocks: FreeList, elements: int, placed: Mapping[int, PlacedImage]
    ) -> list[tuple[Piece, int, int]] | None:
        """Cut elements off the end of `blocks`, and find holes for the pieces of images that lie
        there.

        Returns each of these pieces with its slot and its new offset; None if one fits no hole.

        placed: images in `blocks`, by slot.
        """
        end, targets = self.elements - elements, list[tuple[Piece, int, int]]()
        inside = [(p, slot) for slot, image in placed.items() for p in _pieces_behind(image, end)]
        blocks.cut(elements)
        for piece, slot in sorted(inside, key=lambda item: item[0].begin - item[0].end):
            target = blocks.allocate(piece.end - piece.begin)
            if target is None:
                return None
            if piece.offset < end:  # after the new place is chosen, which so lies before it
                blocks.release(piece.offset, end - piece.offset)
            targets.append((piece, slot, target))
        return targets

    def _compact(self, elements: int) -> Compact:
        """Plan to compact one range of the arena, so that its end is free for `elements` elements.

        Chooses the range with the fewest elements to move. The books have the new places at once;
        the data stay until the caller runs the returned command, which moves the range's images
        (packed adapters) to its front.
        """
        begin, end = self._blocks.cheapest_range(elements)
        inside = [
            (piece, slot)
            for slot, placed in self._placed.items()
            for piece in placed.pieces
            if begin <= piece.offset < end
        ]
        target, moves = begin, list[Move]()
        for piece, slot in sorted(inside, key=lambda item: item[0].offset):
            moves.append(Move(piece.offset, target, piece.end - piece.begin))
            self._placed[slot] = _with_moved(self._placed[slot], piece, target)
            target += piece.end - piece.begin
        self.moved_elements += target - begin
        self._blocks.compact(begin, end)
        return Compact(tuple(moves), tuple(self._row(slot) for slot in {s for _, s in inside}))

    def _row(self, slot: int) -> WriteRow:
        placed = self._placed[slot]
        begins = [piece.begin for piece in placed.pieces]
        holders = [placed.pieces[bisect_right(begins, at) - 1] for at in placed.layout.layers]
        offsets = torch.tensor([piece.offset - piece.begin for piece in holders])
        vectors = placed.layout.vectors_at(offsets[:, None])
        row = placed.layout.rows_at(offsets[:, None, None]).numpy()
        return WriteRow(slot, row, None if vectors is None else vectors.numpy())


def _pieces_behind(placed: PlacedImage, end: int) -> list[Piece]:
    """Return the pieces of an image that reach behind an element of the arena."""
    return [p for p in placed.pieces if p.offset + p.end - p.begin > end]


def _with_moved(placed: PlacedImage, moved: Piece, target: int) -> PlacedImage:
    pieces = (replace(p, offset=target) if p is moved else p for p in placed.pieces)
    return replace(placed, pieces=tuple(pieces))
