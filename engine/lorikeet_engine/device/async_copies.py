"""Asynchronous copies between host and device.

On CUDA, copies go through pinned memory and run in the order of the current stream, so the host
never waits for running steps. On a CPU nothing is copied: the device's tensors are the host's.
"""

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy an array to the device; kernels launched afterwards can read the result."""
    host = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def zeros_to_upload(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros in host memory that `upload` can copy directly: pinned if `device` is CUDA."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Download:
    """Copy of a tensor from the device to the host, which runs in the background.

    tensor: the tensor on the device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._host = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            # blocking: the waiting thread sleeps instead of spinning on its core
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """Wait for the copy and everything launched before it; return the values on the host.

        Raises the device's error if anything launched before has failed.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
