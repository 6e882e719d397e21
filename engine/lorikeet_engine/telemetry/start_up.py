"""Measurement of the device memory and time that each stage of a start takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lorikeet_engine.device.memory import free_bytes, gib
from lorikeet_engine.errors import DeviceLost, SettingsError


class DeviceMemory:
    """Free memory of a device, and the memory that parts of the engine have taken.

    free: bytes that are still free.
    bytes: part's name → bytes that the part has taken.
    """

    def __init__(self, free: int) -> None:
        self.free = self._free_at_first = free
        self.bytes: dict[str, int] = {}

    def take(self, name: str, size: int) -> None:
        """Record that a part of the engine took this many bytes.

        size: decrease of the free bytes. If other processes freed more than the part took, the size
            is negative, and the part counts as 0 bytes.
        """
        self.bytes[name] = max(0, size)
        self.free -= size

    def __str__(self) -> str:
        taken = "".join(f", {gib(size)} for the {name}" for name, size in self.bytes.items())
        return f"of {gib(self._free_at_first)} free at first{taken}, {gib(self.free)} are left"


class StartUpStages(DeviceMemory):
    """Memory and time that each stage of an engine's start took.

    bytes: stage's name → bytes of device memory that the finished stage took.
    seconds: stage's name → seconds that the finished stage took.
    free: bytes free on the device for the next stage. Memory of other processes counts as used.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(free_bytes(device))
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the time and the device memory that the block takes; record them by `name`.

        Raises SettingsError if the device runs out of memory.
        """
        began_s = time.perf_counter()
        try:
            yield
        except (RuntimeError, DeviceLost) as error:  # of torch, of the driver, of other ranks
            if "out of memory" not in str(error):
                raise
            raise SettingsError(
                f"{self.device} has no room for the {name}: {self}: lower adapter_gpu_bytes, "
                "max_batch_tokens, max_running or kv_bytes, or use a larger device"
            ) from error
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] = time.perf_counter() - began_s
        self.take(name, self.free - free_bytes(self.device))

    @property
    def facts(self) -> dict[str, float]:
        """All measurements as fields for the log: <stage>_bytes, <stage>_s and free_bytes."""
        names = {stage: stage.lower().replace(" ", "_") for stage in self.bytes}
        sizes = {f"{names[stage]}_bytes": size for stage, size in self.bytes.items()}
        times = {f"{names[stage]}_s": round(s, 3) for stage, s in self.seconds.items()}
        return {**sizes, **times, "free_bytes": self.free}
