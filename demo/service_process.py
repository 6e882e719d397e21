"""Process of `serve run` that ends with all it started, even if its terminal or script dies."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

import psutil

STOP_SIGNAL = signal.SIGUSR1
"""Signal of `make stop`: raises KeyboardInterrupt in `make serve`, where SIGINT may be ignored.

SIGTERM would leave the service less time, as its senders may kill soon after.
"""
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """SIGTERM or SIGHUP was received, or the output is closed."""


def raise_when_terminated() -> None:
    """Make SIGTERM and SIGHUP raise Terminated; a SIGHUP ignored by nohup stays ignored."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)


class ServiceProcess:
    """Command in a session of its own, which includes all processes that it starts."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command. A signal that arrives during the start raises at the end of the start.

        If it raised earlier, the caller would not know the process that must be stopped. Call this
        where exceptions of signals are caught.
        """
        came: list[int] = []
        # A shell's & ignores SIGINT, which children would inherit: `serve run` must heed SIGINT.
        heeded = [each for each in _TERMINATING if signal.getsignal(each) is not signal.SIG_IGN]
        before = {
            each: signal.signal(each, lambda number, _: came.append(number))
            for each in (signal.SIGINT, STOP_SIGNAL, *heeded)
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                start_new_session=True,  # Ctrl-C reaches it once, from here, and no worker
            )
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)

    def ends_within(self, seconds: float) -> bool:
        """Whether the command ends within `seconds`. Raises Terminated if the output is closed."""
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
        say("Stopped.")
        return 0

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("start() has not been called")
        return self._process

    def _kill_session(self) -> None:
        """Kill the processes left in the session. Ray's workers need this, as they have process
        groups of their own.
        """
        for pid in psutil.pids():
            with suppress(OSError):  # the process has just ended
                if os.getsid(pid) == self._started.pid:
                    os.kill(pid, signal.SIGKILL)


def say(text: str) -> None:
    """Print a text, unless the output is closed."""
    try:
        print(text, flush=True)
    except OSError:  # the flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def _output_is_lost() -> bool:
    """Whether the terminal is closed, or the pipe's reader has gone."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)  # errors only, which are always reported
    lost = select.POLLERR | select.POLLHUP
    return any(event & lost for _, event in outputs.poll(0))
