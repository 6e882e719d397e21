"""The GPUs that torch sees, and the CUDA versions of torch and of the driver."""

import ctypes
from dataclasses import dataclass
from itertools import permutations

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory, free: bytes."""

    name: str
    memory: int
    free: int
    capability: Version = (9, 0)


@dataclass(frozen=True, slots=True)
class Cuda:
    """torch: the CUDA version it was built for; None: none, or there is no torch.

    driver: the newest CUDA version that the driver knows; None: there is no driver.
    peers: whether each GPU can read the others' memory.
    """

    gpus: tuple[Gpu, ...] = ()
    torch: Version | None = None
    driver: Version | None = None
    peers: bool = True


def find_cuda() -> Cuda:
    """What is here."""
    driver = _driver()
    try:
        import torch
    except ImportError:  # the versions' check says so
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
