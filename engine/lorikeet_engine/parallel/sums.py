"""Sums over ranks: the all-reduce after o_proj and down_proj in a tensor parallel replica.

`RankSums` has four ways to sum and uses the fastest that supports the tensor:

    way                             kernel                                       tensors
    row exchange, inside the norm   kernels/pointwise/sum_over_ranks.py          few rows, bfloat16
    symmetric memory, one shot      torch.ops.symm_mem.one_shot_all_reduce_out   to ONE_SHOT_BYTES
    symmetric memory, two shots     torch.ops.symm_mem.two_shot_all_reduce_      to LARGEST_BYTES
    ordinary all-reduce             NCCL's on CUDA, Gloo's on CPUs               all others

models/norms.py:summed_product asks for a row exchange first (`exchange_for`), and calls
`all_reduce` where there is none. No way uses NVLink multicast (multimem). On CUDA every sum is
launched on the current stream and can be captured in a graph.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ONE_SHOT_BYTES = 256 << 10
"""Limit on the bytes of a tensor that is summed in one shot, by every rank for itself.

Measured on two H200s (docs/benchmarks.md).
"""
LARGEST_BYTES = 8 << 20
"""Bytes of the largest tensor that is summed over symmetric memory; NCCL sums larger tensors."""
MOST_SENT_BYTES = 1 << 20
"""Limit on the bytes that a rank sends for one row exchange; larger sums use another way.

Measured on two H200s (docs/log.md).
"""
_DTYPES = (torch.bfloat16, torch.float32)  # that torch's symmetric memory kernels add
# Limit of the wait, in torch's exchange of memory handles, for a rank that has failed there.
_MAP = timedelta(seconds=20)


class _Unmapped(Protocol[T_co]):
    def map_peers(self) -> T_co: ...


class RankSums:
    """Sums over all ranks of a replica, each by the fastest way that its GPUs support.

    Every rank must call the same methods in the same order, with tensors of the same shapes.
    """

    def __init__(self, device: torch.device, store: dist.Store) -> None:
        """Map symmetric memory on CUDA, if all ranks can. Waits for all ranks.

        device: GPU that only this rank uses, or the CPU.
        store: store of the process group, which must be initialised.
        """
        self._device = device
        self._store = store
        self._symmetric = self._connect_symmetric(device) if device.type == "cuda" else None
        self._exchange: RowExchange | None = None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks, bit for bit the same in each
        rank.
        """
        if self._symmetric is not None and self._symmetric.can_sum(tensor):
            self._symmetric.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)

    def connect_rows(self, width: int) -> None:
        """Map memory of all ranks for exchanges of rows, if all ranks can. Waits for all ranks.

        width: number of elements of a row.
        """
        if self._symmetric is not None:
            self._exchange = self._connect(partial(RowMemory, self._device, width))

    def exchange_for(self, rows: torch.Tensor) -> "RowExchange | None":
        """Return the exchange through which a norm's kernel sums these rows over ranks itself.

        Returns None if no exchange supports the rows' shape and dtype. Then `all_reduce` must sum
        the rows before the norm.

        rows [tokens, width]: only shape and dtype are read.
        """
        exchange = self._exchange
        return exchange if exchange is not None and exchange.can_sum(rows) else None

    def _connect_symmetric(self, device: torch.device) -> "SymmetricSums | None":
        """Return sums over symmetric memory, in which each GPU reads all others'.

        Returns None in all ranks if any rank cannot map it.
        """
        if not _in_all_ranks(can_map_peers(device, dist.get_world_size())):
            return None
        sums = self._connect(partial(SymmetricSums, device))
        if sums is None:
            log.warning("symmetric_memory_left_out")
        return sums

    def _connect(self, allocate: Callable[[], _Unmapped[T]]) -> T | None:
        """Allocate this rank's memory and map the memory of all ranks; return None if any rank
        fails.

        allocate: returns this rank's memory, whose map_peers maps that of all ranks.
        """
        # in two steps: no rank enters the exchange of handles unless all can
        unmapped = self._attempt(allocate)
        if unmapped is None:
            return None
        usual = self._store.timeout
        self._store.set_timeout(_MAP)
        mapped = self._attempt(unmapped.map_peers)
        self._store.set_timeout(usual)
        return mapped

    def _attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, or None in all ranks if `make` raises RuntimeError in any.

        Waits for all ranks.
        """
        made = None
        try:
            made = make()
        except RuntimeError as error:
            log.warning("rank_attempt_failed", extra={"rank": dist.get_rank(), "error": str(error)})
        return made if _in_all_ranks(made is not None) else None


class SymmetricSums:
    """Sums over ranks in one or two launches, in which each GPU reads all others' memory.

    Each rank copies its tensor to memory that all ranks have mapped, and one of torch's kernels
    sums there. For a small tensor, every rank sums the whole (one shot). For a larger tensor, every
    rank sums one part, then fetches the other parts from the ranks that summed them (two shots).

    Call map_peers before the first sum.
    """

    def __init__(self, device: torch.device, largest_bytes: int = LARGEST_BYTES) -> None:
        """Allocate this rank's buffers. Raises RuntimeError if symmetric memory is not available.

        largest_bytes: bytes of the largest tensor that can be summed.
        """
        from torch.distributed import _symmetric_memory as memory

        assert dist.group.WORLD is not None
        self._group: str = dist.group.WORLD.group_name
        self._largest_bytes = largest_bytes
        self._operators: Any = torch.ops.symm_mem
        self._buffers = {
            dtype: memory.empty(largest_bytes // dtype.itemsize, dtype=dtype, device=device)
            for dtype in _DTYPES
        }

    def map_peers(self) -> Self:
        """Map the buffers of all ranks and return self. All ranks must call this together.

        Raises RuntimeError if a GPU cannot map another's memory, or if another rank has raised an
        error.
        """
        from torch.distributed import _symmetric_memory as memory

        for buffer in self._buffers.values():
            memory.rendezvous(buffer, self._group)
        return self

    def can_sum(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of this dtype and size can be summed over symmetric memory."""
        size, unit = tensor.nbytes, 16
        if size > ONE_SHOT_BYTES:
            unit *= dist.get_world_size()  # every rank's share is a multiple of 16 bytes
        return tensor.dtype in self._buffers and size <= self._largest_bytes and not size % unit

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks, which is the same in each rank."""
        if tensor.nbytes <= ONE_SHOT_BYTES:
            self.sum_in_one_shot(tensor)
        else:
            self.sum_in_two_shots(tensor)

    def sum_in_one_shot(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over ranks in one launch.

        Every rank adds up all ranks' tensors, in the order of ranks.
        """
        shared = self._shared(tensor)
        # Not one_shot_all_reduce_copy_out: its blocks tell peers that they have copied before all
        # of their threads have.
        self._operators.one_shot_all_reduce_out(shared, "sum", self._group, tensor)

    def sum_in_two_shots(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over ranks in two launches.

        Every rank sums one part of the tensors, then fetches the other parts from the ranks that
        summed them.
        """
        shared = self._shared(tensor)
        self._operators.two_shot_all_reduce_(shared, "sum", self._group)
        tensor.copy_(shared)

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to memory that all ranks can read, and return the copy."""
        shared: torch.Tensor = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        return shared.copy_(tensor)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Memory through which ranks send one another rows to sum, without any barrier.

    A row exchange is part of the kernel that normalises the sum
    (kernels/pointwise/sum_over_ranks.py): the kernel writes its row directly to the memory of every
    other rank, and waits until the rows of all other ranks have arrived in its own rank's memory.

    Each 32-bit word in this memory holds one bfloat16 element and the last 16 bits of the row's
    epoch, the number of times that the row was summed. A word arrives whole, and its reader sees
    from these bits whether it is new. So the order of writes does not matter, nor which thread
    makes them (NCCL calls this protocol LL).

    Each rank counts a row's epochs on the device, in the kernel itself, so replays of a CUDA graph
    continue the count. All ranks launch the same sums in the same order, so they agree on every
    row's epoch, even if sums of fewer rows, or sums that use no row exchange, lie between.

    Even and odd epochs have separate memory. No rank overwrites a row that another has yet to read:
    rank A writes its row of epoch e over its row of e - 2 in B's memory. A's kernel of epoch e - 1
    has ended by then, as kernels of a stream follow one another, and it ended only after it had
    read B's row of e - 1. B's kernel that sent this row began after B's kernel of epoch e - 2 had
    ended, with all its reads. So A is ahead of B by one epoch at most. (This would not hold for a
    kernel that is launched before the preceding one has ended.)

    No rank takes an old word for a new one: until the word of epoch e arrives, memory holds the
    word of e - 2, or 0 before epochs 1 and 2. The 16 epoch bits of these words differ from e's.
    All rows have one width, so every word is written in every epoch.

    rank: index of this rank.
    received [2, world, maximum rows, width] int32: rows sent to this rank, by parity of the epoch
        and by sending rank.
    addresses [world] int64: address of each rank's `received`, as mapped on this GPU.
    epochs [maximum rows] int32: last epoch of each row.
    """

    rank: int
    received: torch.Tensor
    addresses: torch.Tensor
    epochs: torch.Tensor

    def can_sum(self, rows: torch.Tensor) -> bool:
        """Return whether the exchange can sum rows of this shape and dtype.

        rows [rows, width]: must be contiguous.
        """
        _, _, most, width = self.received.shape
        return rows.dtype == torch.bfloat16 and len(rows) <= most and rows.shape[1] == width


def most_rows(width: int, world: int) -> int:
    """Return the maximum number of rows that one row exchange sums.

    width: number of elements of a row.
    world: number of ranks.
    """
    word_bytes, peers = 4, world - 1
    return max(1, MOST_SENT_BYTES // (width * word_bytes * peers))


class RowMemory:
    """Memory of this rank for a RowExchange, before the other ranks have mapped it."""

    def __init__(self, device: torch.device, width: int) -> None:
        """Allocate this rank's memory. Raises RuntimeError if symmetric memory is not available.

        width: elements of a row.
        """
        from torch.distributed import _symmetric_memory as memory

        assert dist.group.WORLD is not None
        self._group: str = dist.group.WORLD.group_name
        world = dist.get_world_size()
        shape = 2, world, most_rows(width, world), width
        self._received = memory.empty(*shape, dtype=torch.int32, device=device)
        self._received.zero_()
        torch.cuda.synchronize(device)  # before any peer can write

    def map_peers(self) -> RowExchange:
        """Map the memory of all ranks and return the exchange. All ranks must call this together.

        Raises RuntimeError if a GPU cannot map another's memory, or if another rank has raised an
        error.
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


def can_map_peers(device: torch.device, world: int) -> bool:
    """Return whether this GPU can map the memory of all ranks' GPUs, which are the first `world`
    GPUs.
    """
    others = [index for index in range(world) if index != device.index]
    return device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(device, other) for other in others
    )


def _in_all_ranks(holds: bool) -> bool:
    """Return whether `holds` is true in every rank. Waits for all ranks."""
    flag = torch.tensor([holds], dtype=torch.int64)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
