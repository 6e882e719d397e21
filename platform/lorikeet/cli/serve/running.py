"""Lock file of the service that runs in this folder, by which `lorikeet stop` finds it."""

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TextIO

from lorikeet.cli.serve.service_process import STOP_SIGNAL
from lorikeet.errors import InvalidSetting, LorikeetError

STATE = Path(".lorikeet")
"""Folder of the service's lock, log and keys, in the current folder."""
_RUNNING = STATE / "serve.pid"
_READY = "ready"
_STOP_S = 80  # longer than run._STOP_S, after which the service kills its processes


def hold_pid_file() -> TextIO:
    """Mark this folder's service as running for as long as the returned file is open.

    From then on `lorikeet stop` raises KeyboardInterrupt here.

    Raises InvalidSetting if the service runs already, or the folder belongs to another user.
    """
    try:
        STATE.mkdir(exist_ok=True)
        STATE.chmod(0o700)  # an older folder may be open to other users
        file = _RUNNING.open("a+")
    except OSError as error:
        raise InvalidSetting(f"{error}: {STATE} must be a folder of yours; remove it") from error
    if not _lock(file):
        raise InvalidSetting("the service of this folder runs already: `lorikeet stop` stops it")
    signal.signal(STOP_SIGNAL, signal.default_int_handler)
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
    return file


def note_ready(file: TextIO) -> None:
    """Note in the file that hold_pid_file returned that the service is ready."""
    print(_READY, file=file, flush=True)


def is_ready(pid: int) -> bool:
    """Whether this folder's service is the process `pid`, and is ready."""
    try:
        return _RUNNING.read_text().split() == [str(pid), _READY]
    except OSError:
        return False


def stop_service() -> bool:
    """Stop this folder's service, and no other; return whether it ran.

    Raises LorikeetError if it does not stop in time.
    """
    if not _RUNNING.exists():
        return False
    with _RUNNING.open("r+") as file:
        if _lock(file):
            return False
        os.kill(int(file.read().split()[0]), STOP_SIGNAL)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            if _lock(file):
                return True
            time.sleep(0.1)
    raise LorikeetError(f"the service has not stopped within {_STOP_S} s: see its output")


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
