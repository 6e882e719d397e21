"""Engine processes forked from one that has imported torch, which saves 2 s of processor time.

Tests of the process itself, and tests that start a service, start engines as `client` does.
"""

import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from tests.engine.forkserver import FORKSERVER, preload

preload("lorikeet_engine.process.server")
_started: list["ForkedEngine"] = []


class ForkedEngine:
    """The part of Popen's interface that `client` uses."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def start(calls: Connection, messages: Connection) -> ForkedEngine:
    """Start an engine's process, in place of `client._start`."""
    with calls, messages:
        process = FORKSERVER.Process(target=_serve, args=(calls, messages), daemon=True)
        process.start()
    _started.append(ForkedEngine(process))
    return _started[-1]


def processes() -> set[int]:
    """Engine processes that have not ended."""
    return {engine.pid for engine in _started if psutil.pid_exists(engine.pid)}


def _serve(calls: Connection, messages: Connection) -> None:
    from lorikeet_engine.process import server  # imports torch

    os.setpgid(0, 0)
    sys.argv = ["server", str(calls.fileno()), str(messages.fileno())]
    server.main()
