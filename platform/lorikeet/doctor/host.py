"""The machine without its GPUs: its memory, and what limits its processes."""

import os
import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Host:
    """memory, available, shm: bytes; a container's where that has less.

    open_files: how many a process may have at once; Ray raises its own limit to this one.
    """

    memory: int
    available: int
    shm: int | None
    open_files: int


def this_host() -> Host:
    """Where this process runs."""
    memory, available = _memory()
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = open_files == resource.RLIM_INFINITY
    return Host(
        memory=memory,
        available=available,
        shm=shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
        open_files=2**20 if unlimited else open_files,
    )


def _memory() -> tuple[int, int]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = _number(_MEMINFO, r"MemAvailable:\s+(\d+)")
    available = total if kib is None else kib << 10
    limit = _number(_CGROUP / "memory.max", r"(\d+)")
    if limit is None or limit >= total:
        return total, available
    used = _number(_CGROUP / "memory.current", r"(\d+)") or 0
    cached = _number(_CGROUP / "memory.stat", r"inactive_file (\d+)") or 0  # given back when asked
    return limit, min(available, limit - used + cached)


def _number(file: Path, pattern: str) -> int | None:
    """None where there is no such file or no such number in it."""
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return int(found[1]) if found else None
