"""Sums over ranks in one launch: each GPU reads the others' memory itself.

For small tensors NCCL's sum is mostly waiting. Here each rank copies its tensor to memory that all
have mapped, and torch's one_shot_all_reduce reads all of them in one kernel. It is never the one
that uses NVLink multicast (multimem). With W ranks a GPU reads W - 1 times the tensor, so large
ones stay with NCCL.
"""

from typing import Any, Self

import torch
import torch.distributed as dist

LARGEST_BYTES = 512 << 10
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
        size = tensor.nbytes
        return tensor.dtype in self._buffers and size <= self._largest_bytes and not size % 16

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a dense tensor by the sum over all ranks; added in their order in each."""
        shared = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        # Not by one_shot_all_reduce_copy_out: its blocks tell peers that they have copied before
        # all of their threads have.
        shared.copy_(tensor)
        self._operators.one_shot_all_reduce_out(shared, "sum", self._group, tensor)


def can_map_peers(device: torch.device, world: int) -> bool:
    """Whether this GPU can map the memory of those of all ranks, which are the first `world`."""
    others = [index for index in range(world) if index != device.index]
    return device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(device, other) for other in others
    )
