"""Programs that keep a host busy beside a service, and wait times of the service's threads."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Self

import torch

from loadtest.real_service.service import parts_of_processes

_READY_WITHIN_S = 60.0
_SAMPLE_S = 0.05
_MS_OF_NS = 1e-6
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:  # end with a killed parent
    for _ in range(10_000_000):
        pass
"""


class HostLoad(StrEnum):
    """Kind of load that programs beside the service put on the host."""

    QUIET = "quiet"
    SPINNING = "spinning"
    PINNING = "pinning"
    BOTH = "both"


@contextmanager
def host_load(kind: HostLoad, pinned_bytes: int) -> Iterator[None]:
    """Keep this host busy until the end of the block.

    Spinning: one process for each core, never waiting. Pinning: one process that pins
        `pinned_bytes` of memory, copies them to the host's last GPU and releases them, again and
        again; without a GPU it only locks and unlocks the memory. Raises RuntimeError if memory
        cannot be pinned.
    """
    with ExitStack() as stack:
        if kind in (HostLoad.PINNING, HostLoad.BOTH):
            stack.enter_context(_pinning(pinned_bytes))  # first: imports torch, on a free core
        if kind in (HostLoad.SPINNING, HostLoad.BOTH):
            stack.enter_context(_spinning(len(os.sched_getaffinity(0))))
        yield


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def _pinning(pinned_bytes: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=pin_in_turns, args=(ready, pinned_bytes), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + _READY_WITHIN_S
        while not ready.wait(_SAMPLE_S):
            if process.exitcode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no memory was pinned; exit code {process.exitcode}")
        yield
        if process.exitcode is not None:
            raise RuntimeError(f"pinning ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def pin_in_turns(ready: Event, pinned_bytes: int) -> None:
    """Pin and release memory forever; set `ready` after the first turn."""
    memory = torch.ones(pinned_bytes, dtype=torch.uint8)
    turn = _turn_on_cpu
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.cuda.device_count() - 1)
        turn = _turn_on_gpu
    while True:
        turn(memory)
        ready.set()


def _turn_on_gpu(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    for part in memory.split(64 << 20):
        part.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    torch.cuda.check_error(cudart.cudaHostUnregister(memory.data_ptr()))


def _turn_on_cpu(memory: torch.Tensor) -> None:
    libc, where = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(memory.data_ptr())
    for call in (libc.mlock, libc.munlock):
        if call(where, ctypes.c_size_t(memory.nbytes)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class WaitTimes:
    """`with` block that measures the time for which threads of the service's processes wait, and
    where.

    Threads that end within the block are not counted.
    """

    def __init__(self) -> None:
        self.run_delays_ms: dict[str, float] = {}
        """Process → milliseconds in which its threads were runnable but not running."""
        self.blocked: dict[str, int] = {}
        """Process and kernel function → samples in uninterruptible sleep."""
        self.samples = 0
        self._found: Counter[str] = Counter()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._before = _run_delays_ns()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sampler.join()
        delays: Counter[str] = Counter()
        for task, (part, waited_ns) in _run_delays_ns().items():
            delays[part] += waited_ns - self._before.get(task, (part, 0))[1]
        self.run_delays_ms = {part: round(ns * _MS_OF_NS) for part, ns in delays.most_common()}
        self.blocked = dict(self._found.most_common(6))

    def _sample(self) -> None:
        tasks = [each for each in _tasks() if each[0] in ("engines", "replicas")]
        while not self._ended.wait(_SAMPLE_S):
            self.samples += 1
            for part, task in tasks:
                with suppress(OSError):  # the thread has just ended
                    if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                        self._found[f"{part} in {(task / 'wchan').read_text()}"] += 1


def _tasks() -> Iterator[tuple[str, Path]]:
    """Yield for each thread of the service the kind of its process, and the thread's folder in
    /proc.
    """
    for pid, part in parts_of_processes().items():
        with suppress(OSError):
            yield from ((part, task) for task in Path(f"/proc/{pid}/task").iterdir())


def _run_delays_ns() -> dict[Path, tuple[str, int]]:
    """Return for each thread its process kind, and the time it was runnable but not running."""
    found = {}
    for part, task in _tasks():
        with suppress(OSError):
            found[task] = part, int((task / "schedstat").read_text().split()[1])
    return found
