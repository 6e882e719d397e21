"""Asynchronous copies between host and device.

On CUDA they go through pinned memory in the order of the current stream, so the host never stands
still for the steps in flight; torch keeps the memory until the copy is over. On a CPU they are
plain tensors.
"""

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The array on the device, for kernels launched from now on."""
    host = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def zeros_to_upload(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros on the host, from where `device` takes them without a copy on the way."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Download:
    """A tensor's values on their way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._host = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            # blocking: the thread sleeps and leaves its core to others
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """The values on the host, once everything that was launched before the copy is done.

        Raises what went wrong on the device meanwhile.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
