"""Followers forked from a process that has imported torch, which saves 2 s of processor time each.

Tests of how followers start, and of their command lines, start followers as `Followers` does.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from tests.engine.forkserver import FORKSERVER, preload

preload("lorikeet_engine.execution.follower")
_SPARE = 512  # above every descriptor number that a follower needs


class ForkedFollower:
    """The part of Popen's interface that `Followers` uses."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid, self._process = process.pid, process

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; return its exit status. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("follower", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


class _Descriptor:
    """Descriptor that is sent to another process by pickling: a pair (number, copy) arrives."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._number, DupFd(self._number))


def _received(number: int, copy: Any) -> tuple[int, int]:
    return number, copy.detach()


def start(numbers: Sequence[int], fds: Sequence[int]) -> ForkedFollower:
    """Start a follower, in place of `followers._start`."""
    arguments = list(numbers), [_Descriptor(fd) for fd in fds]
    process = FORKSERVER.Process(target=_follow, args=arguments, daemon=True)
    process.start()
    return ForkedFollower(process)


def start_as_child(numbers: Sequence[int], fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Start a follower, in place of `followers._start`, as a child of this process.

    The kernel tells the end of the one to the other. Only processes of FORKSERVER call this: others
    may have threads whose locks the follower would wait for.
    """

    def follow() -> None:
        status = 1
        try:
            _close_all_but(fds)  # Popen waits until the pipe to its child is closed
            Path("/proc/self/comm").write_text("follower")
            _run(numbers)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    return subprocess.Popen(["-"], preexec_fn=follow, pass_fds=fds, stdin=subprocess.DEVNULL)


def _close_all_but(fds: Sequence[int]) -> None:
    ends = [2, *sorted(fds), os.sysconf("SC_OPEN_MAX")]
    for before, after in pairwise(ends):
        os.closerange(before + 1, after)


def _follow(numbers: Sequence[int], inherited: Sequence[tuple[int, int]]) -> None:
    copies = [_moved(copy, _SPARE + at) for at, (_, copy) in enumerate(inherited)]
    for (number, _), copy in zip(inherited, copies, strict=True):
        _moved(copy, number)
    _run(numbers)


def _run(numbers: Sequence[int]) -> None:
    from lorikeet_engine.process import follower  # imports torch

    sys.argv = ["follower", str(os.getppid()), *map(str, numbers)]
    follower.main()


def _moved(fd: int, number: int) -> int:
    os.dup2(fd, number)
    os.close(fd)
    return number
