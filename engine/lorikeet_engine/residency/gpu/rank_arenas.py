"""The arenas of a tensor parallel replica, in which all ranks do what the leader's does.

All ranks' images of an adapter are laid out alike, so a place in one arena is a place in all, and
one process's accounts (slots.py) hold for every one. Commands and steps go to the followers in one
order: what arena.py says of streams holds in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.parallel.followers import Followers, RankCopies, for_good
from lorikeet_engine.residency.checksums import added
from lorikeet_engine.residency.gpu.arena import Command, DeviceArena, Piece
from lorikeet_engine.residency.gpu.image_copies import CopyEvent, CopyTotal, ImageCopy


@dataclass(frozen=True, slots=True)
class CopyImage:
    """Copy a rank's image from the host to where its pieces lie, and report that with its sum.

    copy: its number. begin: the element of the host arena at which rank 0's image begins; those of
    the other ranks follow it, each of `elements`.
    """

    copy: int
    begin: int
    elements: int
    pieces: tuple[Piece, ...]


class LeadingArena(DeviceArena):
    """A DeviceArena whose commands and copies the followers get as well.

    A copy is over once it is in all ranks. What raises here and not there would leave the arenas
    unlike: both methods raise DeviceLost then.
    """

    def __init__(self, weights: LoraWeights, device: torch.device, followers: Followers) -> None:
        super().__init__(weights, device)
        self._followers = followers
        self._numbers = 0

    def run(self, *commands: Command) -> None:
        """Run commands here, and in the followers before the next step or copy."""
        self._followers.queue(*commands)
        with for_good():
            super().run(*commands)

    def copy(self, image: torch.Tensor, pieces: Sequence[Piece]) -> ImageCopy:
        """Copy all ranks' images, end to end in the host arena, each to its GPU."""
        elements = sum(piece.end - piece.begin for piece in pieces)
        self._numbers += 1
        others = self._followers.expect_copy(self._numbers)
        begin = int(image.storage_offset())
        with for_good():
            self._followers.send(CopyImage(self._numbers, begin, elements, tuple(pieces)))
            total, event = super().copy(image[:elements], pieces)
        return ImageCopy(_Total(total, others), _InAllRanks(event, others))


def arena_of(
    weights: LoraWeights, device: torch.device, followers: Followers | None
) -> DeviceArena:
    """The arena of an engine with these followers, or with none."""
    if followers is None:
        return DeviceArena(weights, device)
    return LeadingArena(weights, device, followers)


class FollowingArena(DeviceArena):
    """A follower's: does what the leader's says, with the images of its own rank."""

    def __init__(
        self, weights: LoraWeights, device: torch.device, host: torch.Tensor, rank: int
    ) -> None:
        """host: the host arena, as this process sees it."""
        super().__init__(weights, device)
        self._host, self._rank = host, rank

    def copy_own(self, wanted: CopyImage) -> ImageCopy:
        """Copy this rank's image."""
        begin = wanted.begin + self._rank * wanted.elements
        return self.copy(self._host[begin : begin + wanted.elements], wanted.pieces)


@dataclass(frozen=True, slots=True)
class _InAllRanks:
    """The CopyEvent of a copy that is made in all ranks."""

    own: CopyEvent | None
    others: RankCopies

    def synchronize(self) -> None:
        if self.own is not None:
            self.own.synchronize()
        self.others.wait()


@dataclass(frozen=True, slots=True)
class _Total:
    """A CopyTotal: of all ranks' images together."""

    own: CopyTotal
    others: RankCopies

    def wait(self) -> torch.Tensor:
        return torch.tensor(added((int(self.own.wait()), *self.others.wait())))
