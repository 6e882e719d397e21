"""What the processes of a tensor parallel replica say to one another in a step and at start.

A process's place among them is its rank, from 0, the leader's, on: not to be mixed up with an
adapter's rank. On CUDA all of it is launched on the current stream and can be captured in a graph;
the host waits for nothing but in `minimum`. A process that is gone leaves the others waiting: who
starts them watches them.
"""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from lorikeet_engine.parallel.row_exchange import RowExchange, RowMemory
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.parallel.symmetric_sums import SymmetricSums, can_map_peers

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How long ranks wait for one another at start, while each reads its weights.
_START = timedelta(minutes=30)
# How long they wait in torch's exchange of handles for one that has failed there.
_MAP = timedelta(seconds=20)
_ENVIRONMENT = {
    # NVLink multicast can put all GPUs of a host out of service where others share them.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # NCCL's own thread would end the process when a peer is gone, later and without a reason.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


class _Unmapped(Protocol[T_co]):
    def map_peers(self) -> T_co: ...


class RankGroup:
    """The processes that compute a replica's layers together, as one of them sees it.

    Every one must call the same methods in the same order, with tensors of the same shapes. A
    process has at most one.
    """

    def __init__(self, shard: Shard, rendezvous: Path, device: torch.device) -> None:
        """Wait until all have come, and connect to them.

        rendezvous: a file on this host that is not there yet, the same for all of one replica and
        for no other. device: this process's own.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.shard = shard
        cuda = device.type == "cuda"
        self._store = dist.FileStore(str(rendezvous), shard.world)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=self._store,
            rank=shard.index,
            world_size=shard.world,
            timeout=_START,
            device_id=device if cuda else None,
        )
        # both connect and allocate, which no graph could capture, nor a step find room for
        dist.all_reduce(torch.zeros(1, device=device))
        dist.broadcast(torch.zeros(1, dtype=torch.int64, device=device), src=0)
        self._device = device
        self._symmetric_sums = self._connect_symmetric_sums(device) if cuda else None
        self._exchange: RowExchange | None = None

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.shard.index

    @property
    def world(self) -> int:
        """How many processes there are."""
        return self.shard.world

    @property
    def leads(self) -> bool:
        """Whether this is the process that samples tokens."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a dense tensor by the sum over all ranks, bit for bit the same in each."""
        if self._symmetric_sums is not None and self._symmetric_sums.take(tensor):
            self._symmetric_sums.sum_(tensor)
        else:
            dist.all_reduce(tensor)

    def connect_rows(self, width: int) -> None:
        """Let rows of this width be summed by the kernel that reads them, where there is a way.

        Waits for all ranks.
        """
        if self._symmetric_sums is not None:
            self._exchange = self._connect(partial(RowMemory, self._device, width))

    def exchange_for(self, rows: torch.Tensor) -> RowExchange | None:
        """Through which a kernel can sum rows like these itself; None where it is sum_ that can."""
        exchange = self._exchange
        return exchange if exchange is not None and exchange.take(rows) else None

    def gather_logits(self, part: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Logits [rows, vocabulary] at the leader, [0, vocabulary] in the others.

        part [rows, width], dense: this rank's, as Shard.vocabulary has it.
        """
        if not len(part):  # in no rank then; backends need not know how to send nothing
            return part.new_empty(0, vocabulary)
        widths = [len(Shard(rank, self.world).vocabulary(vocabulary)) for rank in range(self.world)]
        padded = part
        if part.shape[1] < widths[0]:
            padded = part.new_zeros(len(part), widths[0])
            padded[:, : part.shape[1]] = part
        if not self.leads:
            dist.gather(padded, dst=0)
            return part.new_empty(0, vocabulary)
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=0)
        return torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast_tokens(self, tokens: torch.Tensor) -> None:
        """Replace tokens [rows] int64 by the leader's."""
        dist.broadcast(tokens, src=0)

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """The least that any rank gave of each value; waits for all ranks. For start-up."""
        least = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return tuple(least.tolist())

    def attempt(self, make: Callable[[], T]) -> T | None:
        """What make gives, or None in all ranks where it raises RuntimeError in any.

        Waits for all ranks.
        """
        made = None
        try:
            made = make()
        except RuntimeError as error:
            log.warning("rank_attempt_failed", extra={"rank": self.rank, "error": str(error)})
        return made if self.minimum([made is not None]) == (1,) else None

    def close(self) -> None:
        """Leave; the others do, too."""
        dist.destroy_process_group()

    def _connect_symmetric_sums(self, device: torch.device) -> SymmetricSums | None:
        """What sums all but large tensors faster than NCCL; None unless all ranks have it."""
        if self.minimum([can_map_peers(device, self.world)]) != (1,):
            return None
        sums = self._connect(partial(SymmetricSums, device))
        if sums is None:
            log.warning("symmetric_memory_left_out")
        return sums

    def _connect(self, allocate: Callable[[], _Unmapped[T]]) -> T | None:
        """What allocated memory is when all ranks have mapped it, or None in all of them."""
        # in two steps: no rank enters the exchange unless all can
        unmapped = self.attempt(allocate)
        if unmapped is None:
            return None
        usual = self._store.timeout
        self._store.set_timeout(_MAP)
        mapped = self.attempt(unmapped.map_peers)
        self._store.set_timeout(usual)
        return mapped
