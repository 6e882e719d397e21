"""Collective communication of the processes of a tensor parallel replica.

Each process has a rank, its index; the leader's is 0. This rank has nothing to do with the rank of
an adapter. On CUDA every collective is launched on the current stream and can be captured in a
graph; only `minimum` makes the host wait. If a process is lost, all others wait forever;
followers.py watches them.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.parallel.sums import RankSums

# Limit of ranks' wait for one another at start, while each reads its weights.
_START = timedelta(minutes=30)
_ENVIRONMENT = {
    # NVLink multicast can put all GPUs of a host out of service where others share them.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # NCCL's own thread would end the process after a peer is gone, late and without a reason.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


class RankGroup:
    """One process's connection to all processes that compute a replica's layers together.

    Every process must call the same methods in the same order, with tensors of the same shapes. A
    process has at most one RankGroup.

    sums: all-reduces over the ranks.
    """

    def __init__(self, shard: Shard, rendezvous: Path, device: torch.device) -> None:
        """Connect to the other processes of the replica. Waits for all these processes.

        shard: this process's index, and the number of processes.
        rendezvous: a file on this host that does not exist yet, the same for all processes of one
            replica and for no other replica.
        device: GPU that only this process uses, or the CPU.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.shard = shard
        cuda = device.type == "cuda"
        store = dist.FileStore(str(rendezvous), shard.world)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=shard.index,
            world_size=shard.world,
            timeout=_START,
            device_id=device if cuda else None,
        )
        # The first calls connect and allocate: no graph could capture that, and no step would have
        # memory left for it.
        dist.all_reduce(torch.zeros(1, device=device))
        dist.broadcast(torch.zeros(1, dtype=torch.int64, device=device), src=0)
        self.sums = RankSums(device, store)

    @property
    def rank(self) -> int:
        """Index of this process among the processes of the replica; the leader's is 0."""
        return self.shard.index

    @property
    def world(self) -> int:
        """Number of processes that compute the replica's layers together."""
        return self.shard.world

    @property
    def leads(self) -> bool:
        """Whether this process is the leader of the replica, which samples tokens."""
        return self.rank == 0

    def gather_logits(self, part: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Gather logits [rows, vocabulary] at the leader; all other processes get [0, vocabulary].

        part [rows, width], contiguous: logits of this process's part of the vocabulary
            (Shard.vocabulary).
        """
        if not len(part):  # then in no rank: spares the backends an empty gather
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
        """Overwrite tokens [rows] int64 in every process with the leader's."""
        dist.broadcast(tokens, src=0)

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return, for each position in `values`, the smallest number that any rank has passed.

        Waits for all ranks; for start-up only.
        """
        least = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return tuple(least.tolist())

    def close(self) -> None:
        """Leave the group of processes. All processes must do so."""
        dist.destroy_process_group()
