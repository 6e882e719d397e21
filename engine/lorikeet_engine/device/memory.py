"""Free memory of a device, and memory sizes given in bytes or as a share of free memory."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.errors import SettingsError


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Memory size given as a share of the memory that is free when it is allocated.

    of_free: the share, above 0 and at most 1.
    """

    of_free: float

    def __post_init__(self) -> None:
        if not 0 < self.of_free <= 1:
            raise SettingsError(f"a share of {self.of_free}: want one above 0 and up to 1")


Memory = int | MemoryShare
"""Memory size: bytes, or a share of the memory that is free."""


def resolve(memory: Memory, free: int) -> int:
    """Convert a memory size to bytes; a MemoryShare becomes at least 1 byte.

    free: bytes of memory that are free.
    """
    return max(1, int(memory.of_free * free)) if isinstance(memory, MemoryShare) else memory


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device.

    Memory that other processes or torch's cache hold is not free.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    facts = Path("/proc/meminfo")
    if facts.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", facts.read_text())
        assert available is not None
        return int(available[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gib(size: int) -> str:
    """Format a number of bytes in GiB, with two decimals."""
    return f"{size / 2**30:.2f} GiB"
