"""Followers forked from a process that has imported torch, which spares 3 s of processor time each.

Tests that lose ranks, or look who is left of them, start them as `Followers` does.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

from tests.engine.ranks import FORKSERVER

_SPARE = 512  # above all numbers of descriptors that a follower is to have


class ForkedFollower:
    """As much of a Popen as `Followers` uses."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid, self._process = process.pid, process

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, once it has ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("follower", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """End it."""
        self._process.kill()


class _Descriptor:
    """A descriptor that a process gets where this is pickled for it: a pair (number, copy)."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._number, DupFd(self._number))


def _received(number: int, copy: Any) -> tuple[int, int]:
    return number, copy.detach()


def start(numbers: Sequence[int], fds: Sequence[int]) -> ForkedFollower:
    """Stand in for `followers._start`."""
    arguments = list(numbers), [_Descriptor(fd) for fd in fds]
    process = FORKSERVER.Process(target=_follow, args=arguments, daemon=True)
    process.start()
    return ForkedFollower(process)


def _follow(numbers: Sequence[int], inherited: Sequence[tuple[int, int]]) -> None:
    from lorikeet_engine.process import follower  # torch

    copies = [_moved(copy, _SPARE + at) for at, (_, copy) in enumerate(inherited)]
    for (number, _), copy in zip(inherited, copies, strict=True):
        _moved(copy, number)
    sys.argv = ["follower", str(os.getppid()), *map(str, numbers)]
    follower.main()


def _moved(fd: int, number: int) -> int:
    os.dup2(fd, number)
    os.close(fd)
    return number
