"""How much memory a device has free, and sizes given in bytes or as a share of that."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.errors import SettingsError


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A part, above 0 and up to 1, of the memory that is free when its turn to allocate comes."""

    of_free: float

    def __post_init__(self) -> None:
        if not 0 < self.of_free <= 1:
            raise SettingsError(f"a share of {self.of_free}: want one above 0 and up to 1")


Memory = int | MemoryShare
"""Bytes, or a share of what is free."""


def resolve(memory: Memory, free: int) -> int:
    """`memory` in bytes where `free` bytes are free; at least one byte."""
    return max(1, int(memory.of_free * free)) if isinstance(memory, MemoryShare) else memory


def free_bytes(device: torch.device) -> int:
    """What the device can still give, other processes and torch's own cache taken into account."""
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
    """A size in bytes for people."""
    return f"{size / 2**30:.2f} GiB"
