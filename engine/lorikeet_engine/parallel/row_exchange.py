"""Memory through which ranks send one another rows to sum, without a barrier before or after.

A sum by torch's kernels is a copy to shared memory, a barrier, the sum and another barrier. Here
one kernel (kernels/pointwise/rank_sums.py) writes its row straight into the memory of every peer
and waits until theirs have come into its own. Each word there is one bfloat16 and 16 bits of the
row's epoch: how many times it was summed. So no order of writes matters, nor which thread made them
(NCCL calls such a protocol LL): a word of 32 bits arrives whole, and whoever reads it sees by
itself whether it is new. It is never memory of NVLink multicast.

Each rank counts a row's epochs on the device, in the kernel itself: a CUDA graph that is replayed
counts on. All ranks launch the same sums in the same order, so they agree on every row's epoch,
whatever lies between: sums of fewer rows, or such as do not go through here.

Even and odd epochs have memory of their own. Why no rank overwrites what another has yet to read:
rank A writes its row of epoch e where that of e - 2 was in B's memory. A's kernel of epoch e - 1
has ended, as kernels of a stream follow one another, and it ended only when it had read what B sent
in e - 1. That came from a kernel of B's which began when B's kernel of epoch e - 2 had ended, with
all that it had to read. So A is ahead of B by one epoch at most. (A kernel that is launched before
the one in front of it has ended would break this.)

Why no rank takes an old word for a new one: where that of epoch e is awaited lies that of e - 2, or
a zero before epochs 1 and 2, and these differ in their 16 bits. All rows have one width, so no word
is left out in any epoch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MOST_SENT_BYTES = 1 << 20
"""The most that a rank sends for one sum: docs/log.md, two H200s."""


@dataclass(frozen=True, slots=True)
class RowExchange:
    """One rank's memory for rows, and where that of its peers is.

    received [2, world, most rows, width] int32: what each rank sent to this one, in even and in odd
    epochs; addresses [world] int64: of each rank's `received`, as this GPU sees it; epochs [most
    rows] int32: each row's last.
    """

    rank: int
    received: torch.Tensor
    addresses: torch.Tensor
    epochs: torch.Tensor

    def take(self, rows: torch.Tensor) -> bool:
        """Whether rows like these [rows, width], dense, can be summed so."""
        _, _, most, width = self.received.shape
        return rows.dtype == torch.bfloat16 and len(rows) <= most and rows.shape[1] == width


def most_rows(width: int, world: int) -> int:
    """The most rows that are summed so."""
    word_bytes, peers = 4, world - 1
    return max(1, MOST_SENT_BYTES // (width * word_bytes * peers))


class RowMemory:
    """What a RowExchange is made of, before the ranks have mapped one another's."""

    def __init__(self, device: torch.device, width: int) -> None:
        """Allocate this rank's part. Raises RuntimeError where there is no such memory."""
        from torch.distributed import _symmetric_memory as memory

        assert dist.group.WORLD is not None
        self._group: str = dist.group.WORLD.group_name
        world = dist.get_world_size()
        shape = 2, world, most_rows(width, world), width
        self._received = memory.empty(*shape, dtype=torch.int32, device=device)
        self._received.zero_()
        torch.cuda.synchronize(device)  # before any peer can write

    def map_peers(self) -> RowExchange:
        """Map the memory of all ranks, in all of them at once.

        Raises RuntimeError where a GPU cannot map another's memory, or another rank has raised.
        """
        from torch.distributed import _symmetric_memory as memory

        own = self._received
        handle: Any = memory.rendezvous(own, self._group)
        ranks = range(dist.get_world_size())
        addresses = [handle.get_buffer(n, own.shape, own.dtype).data_ptr() for n in ranks]
        return RowExchange(
            dist.get_rank(),
            own,
            torch.tensor(addresses, device=own.device),
            torch.zeros(own.shape[2], dtype=torch.int32, device=own.device),
        )
