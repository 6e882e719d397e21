"""The machine as found: memory, shared memory, open files, GPUs, CUDA versions."""

import ctypes
import os
import re
import resource
import shutil
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Host:
    """The machine without its GPUs.

    memory, available: total and available bytes; the container's if it has a lower limit.
    shm: free bytes of /dev/shm; None: there is no /dev/shm.
    open_files: hard limit of open files for each process; Ray raises its soft limit to the hard
        limit.
    """

    memory: int
    available: int
    shm: int | None
    open_files: int


def this_host() -> Host:
    """Inspect the machine, or the container, that this process runs on."""
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
    cached = _number(_CGROUP / "memory.stat", r"inactive_file (\d+)") or 0  # can be reclaimed
    return limit, min(available, limit - used + cached)


def _number(file: Path, pattern: str) -> int | None:
    """Read the number that a pattern finds in a file; None if there is no file or no match."""
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return int(found[1]) if found else None


Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    memory, free: total and free bytes.
    capability: CUDA compute capability.
    """

    name: str
    memory: int
    free: int
    capability: Version = (9, 0)


@dataclass(frozen=True, slots=True)
class Cuda:
    """GPUs and CUDA versions.

    torch: the CUDA version that torch is built for; None: torch is missing or built for the CPU.
    driver: the newest CUDA version that the driver supports; None: there is no driver.
    peers: whether each GPU can read the memory of all others.
    """

    gpus: tuple[Gpu, ...] = ()
    torch: Version | None = None
    driver: Version | None = None
    peers: bool = True


def find_cuda() -> Cuda:
    """Inspect the GPUs, torch and driver of this machine."""
    driver = _driver()
    try:
        import torch
    except ImportError:  # check_versions reports it
        return Cuda(driver=driver)
    if torch.version.cuda is None:
        return Cuda(driver=driver)
    major, minor, *_ = map(int, torch.version.cuda.split("."))
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    pairs = permutations(gpus, 2)
    peers = all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    return Cuda(tuple(map(_gpu, gpus)), (major, minor), driver, peers)


def _gpu(index: int) -> Gpu:
    import torch

    free, memory = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), memory, free, capability)


def _driver() -> Version | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10
