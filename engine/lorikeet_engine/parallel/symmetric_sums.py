"""Sums over ranks in one launch: each GPU reads the others' memory itself.

For tensors of decode steps NCCL's sum is mostly waiting. Here each rank copies its tensor to memory
that all have mapped, and one kernel of torch's sums them: of small tensors each rank adds all up
itself (one shot), of larger ones its share, which the others then fetch (two shots). It is never
one that uses NVLink multicast (multimem). The largest tensors stay with NCCL.
"""

from typing import Any, Self

import torch
import torch.distributed as dist

ONE_SHOT_BYTES = 256 << 10
"""The largest tensor that each rank adds up itself: docs/benchmarks.md, two H200s."""
LARGEST_BYTES = 8 << 20
"""The largest tensor that is summed so."""
_DTYPES = (torch.bfloat16, torch.float32)  # what torch's kernel adds


class SymmetricSums:
    """One buffer for each dtype, which every sum goes through in the order of launches.

    Of no use before map_peers.
    """

    def __init__(self, device: torch.device, largest_bytes: int = LARGEST_BYTES) -> None:
        """Allocate this rank's buffers. Raises RuntimeError where there is no such memory."""
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
        """Map the buffers of all ranks, in all of them at once, and return self.

        Raises RuntimeError where a GPU cannot map another's memory, or another rank has raised.
        """
        from torch.distributed import _symmetric_memory as memory

        for buffer in self._buffers.values():
            memory.rendezvous(buffer, self._group)
        return self

    def take(self, tensor: torch.Tensor) -> bool:
        """Whether sum_ can sum tensors like this one."""
        size, unit = tensor.nbytes, 16
        if size > ONE_SHOT_BYTES:
            unit *= dist.get_world_size()  # of each share
        return tensor.dtype in self._buffers and size <= self._largest_bytes and not size % unit

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a dense tensor by the sum over all ranks, the same in each."""
        if tensor.nbytes <= ONE_SHOT_BYTES:
            self.sum_in_one_shot(tensor)
        else:
            self.sum_in_two_shots(tensor)

    def sum_in_one_shot(self, tensor: torch.Tensor) -> None:
        """Sum in one launch, each rank everything: the ranks' numbers are added in their order."""
        shared = self._shared(tensor)
        # Not by one_shot_all_reduce_copy_out: its blocks tell peers that they have copied before
        # all of their threads have.
        self._operators.one_shot_all_reduce_out(shared, "sum", self._group, tensor)

    def sum_in_two_shots(self, tensor: torch.Tensor) -> None:
        """Sum in two launches: each rank its share, which the others then fetch."""
        shared = self._shared(tensor)
        self._operators.two_shot_all_reduce_(shared, "sum", self._group)
        tensor.copy_(shared)

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor where all ranks can read it."""
        shared: torch.Tensor = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        return shared.copy_(tensor)


def can_map_peers(device: torch.device, world: int) -> bool:
    """Whether this GPU can map the memory of those of all ranks, which are the first `world`."""
    others = [index for index in range(world) if index != device.index]
    return device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(device, other) for other in others
    )
