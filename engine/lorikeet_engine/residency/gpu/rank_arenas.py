"""Arenas of a tensor parallel replica, in which all ranks repeat the leader's operations.

All ranks' images of an adapter are laid out alike: an offset in one arena is valid in all, and one
process's slot pool (slots.py) serves all ranks. Followers receive commands and steps in one order,
so the ordering of streams that arena.py describes holds in each rank.
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
    """Command to copy each rank's part of a packed adapter (its image) from the host to its GPU,
    and to report its checksum at the copy's end.

    copy: number that identifies the copy.
    begin: element of the host arena at which rank 0's image begins; the images of the other ranks
        follow.
    elements: size of each rank's image.
    pieces: places of the image's parts in the GPU's arena.
    """

    copy: int
    begin: int
    elements: int
    pieces: tuple[Piece, ...]


class LeadingArena(DeviceArena):
    """Arena (adapters' GPU memory) of the leading rank. The followers, the other ranks' processes,
    repeat its commands and copies.

    A copy is complete once it is complete in all ranks. An error in the leader alone would make the
    ranks' arenas differ, so `run` and `copy` then raise DeviceLost.
    """

    def __init__(self, weights: LoraWeights, device: torch.device, followers: Followers) -> None:
        super().__init__(weights, device)
        self._followers = followers
        self._numbers = 0

    def run(self, *commands: Command) -> None:
        """Run commands on this rank's arena; the followers run them before their next step
        or copy.
        """
        self._followers.queue(*commands)
        with for_good():
            super().run(*commands)

    def copy(self, image: torch.Tensor, pieces: Sequence[Piece]) -> ImageCopy:
        """Copy an adapter's images of all ranks, each to its rank's GPU.

        image: the images of all ranks, one after another in the host arena.
        pieces: places of the image's parts, which are the same in each GPU's arena.
        """
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
    """Return the arena of an engine: a LeadingArena if there are other ranks.

    weights: the arena and the table of adapters, as tensors on the device.
    followers: processes of the other ranks; None without tensor parallelism.
    """
    if followers is None:
        return DeviceArena(weights, device)
    return LeadingArena(weights, device, followers)


class FollowingArena(DeviceArena):
    """Arena (adapters' GPU memory) of a following rank: repeats the leader's operations with its
    own rank's images.
    """

    def __init__(
        self, weights: LoraWeights, device: torch.device, host: torch.Tensor, rank: int
    ) -> None:
        """Start with an empty arena on this rank's GPU.

        weights: the arena and the table, as tensors on the device.
        host: the host arena, mapped into this process.
        rank: this process's tensor parallel rank.
        """
        super().__init__(weights, device)
        self._host, self._rank = host, rank

    def copy_own(self, wanted: CopyImage) -> ImageCopy:
        """Copy this rank's part of an adapter from the host arena to this rank's GPU.

        wanted: the leader's command.
        """
        begin = wanted.begin + self._rank * wanted.elements
        return self.copy(self._host[begin : begin + wanted.elements], wanted.pieces)


@dataclass(frozen=True, slots=True)
class _InAllRanks:
    """Completion of a copy that all ranks make, once it is complete in all ranks; a CopyEvent.

    own: completion of this rank's copy; None if it is complete.
    others: reports of the other ranks.
    """

    own: CopyEvent | None
    others: RankCopies

    def synchronize(self) -> None:
        if self.own is not None:
            self.own.synchronize()
        self.others.wait()


@dataclass(frozen=True, slots=True)
class _Total:
    """Checksum of an adapter that all ranks copy, summed over the ranks' parts; a CopyTotal.

    own: checksum of this rank's part.
    others: reports of the other ranks.
    """

    own: CopyTotal
    others: RankCopies

    def wait(self) -> torch.Tensor:
        return torch.tensor(added((int(self.own.wait()), *self.others.wait())))
