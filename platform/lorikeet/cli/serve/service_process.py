"""Process of the service that ends with all it started, even if its terminal or script dies."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

import psutil

from lorikeet.cli.output import say

STOP_SIGNAL = signal.SIGUSR1
"""Signal of `lorikeet stop`: raises KeyboardInterrupt where SIGINT may be ignored.

SIGTERM would leave the service less time, as its senders may kill soon after.
"""
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)
_LAST_LINES_S = 1.0


class Terminated(BaseException):
    """SIGTERM or SIGHUP was received, or the output is closed."""


def raise_when_terminated() -> None:
    """Make SIGTERM and SIGHUP raise Terminated; a SIGHUP ignored by nohup stays ignored."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)


class ServiceProcess:
    """Command in a session of its own, which includes all processes that it starts.

    The command reads nothing, and writes to this process's stderr.

    environ: environment variables of the command.
    on_line: gets each line of the command's output, which is then not written to stderr.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._command, self._environ, self._on_line = command, environ, on_line
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start the command. A signal that arrives during the start raises at the end of the start.

        If it raised earlier, the caller would not know the process that must be stopped. Call this
        where exceptions of signals are caught.
        """
        came: list[int] = []
        # A shell's & ignores SIGINT, which children would inherit: the command must heed SIGINT.
        heeded = [each for each in _TERMINATING if signal.getsignal(each) is not signal.SIG_IGN]
        before = {
            each: signal.signal(each, lambda number, _: came.append(number))
            for each in (signal.SIGINT, STOP_SIGNAL, *heeded)
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._on_line else sys.__stderr__,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches it once, from here, and no worker
            )
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        if self._on_line is not None:
            self._reader = threading.Thread(target=self._read, name="service output", daemon=True)
            self._reader.start()
        for number in came:
            signal.raise_signal(number)

    def ends_within(self, seconds: float) -> bool:
        """Wait until the command ends, at most `seconds`; return whether it has ended.

        Raises Terminated if this process's output is closed.
        """
        if _output_is_lost():
            raise Terminated
        with suppress(subprocess.TimeoutExpired):
            self._started.wait(seconds)
        return self._started.returncode is not None

    def stop(self, within_s: float) -> int:
        """End the command as Ctrl-C does, or by force after `within_s`; return the exit status."""
        for late in (STOP_SIGNAL, *_TERMINATING):  # make and a shell may both forward them
            signal.signal(late, signal.SIG_IGN)
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            say("\nStopping… (Ctrl-C again kills it)")
        try:
            self._process.wait(within_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._kill_session()
            self._process.wait()
            say("Killed.")
            return 1
        self._kill_session()
        if self._reader is not None:
            self._reader.join(_LAST_LINES_S)
        say("Stopped.")
        return 0

    @property
    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("start() has not been called")
        return self._process

    def _read(self) -> None:
        """Pass the command's output on, until it is closed."""
        output = self._started.stdout
        assert output is not None
        assert self._on_line is not None
        for line in output:
            self._on_line(line.rstrip("\n"))

    def _kill_session(self) -> None:
        """Kill the processes left in the session. Ray's workers need this, as they have process
        groups of their own.
        """
        for pid in psutil.pids():
            with suppress(OSError):  # the process has just ended
                if os.getsid(pid) == self._started.pid:
                    os.kill(pid, signal.SIGKILL)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def _output_is_lost() -> bool:
    """Whether the terminal is closed, or the pipe's reader has gone."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)  # errors only, which are always reported
    lost = select.POLLERR | select.POLLHUP
    return any(event & lost for _, event in outputs.poll(0))
