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
    total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _MEMINFO.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        available = int(found[1]) << 10 if found else total
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or limit >= total:
        return total, available
    return limit, min(available, limit - (used or 0))


def _number(file: Path) -> int | None:
    """None where there is no such file or no number in it: no limit."""
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdecimal() else None
