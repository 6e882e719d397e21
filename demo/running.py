"""Lock of this folder's running service, and `make stop`, which stops that service and no other."""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from demo.service_process import STOP_SIGNAL
from lorikeet.errors import InvalidSetting

KEYS = Path(".lorikeet")
_RUNNING = KEYS / "serve.pid"
_STOP_S = 80  # `make serve` kills its processes after 60


def hold_pid_file() -> TextIO:
    """Mark this folder's service as running for as long as the returned file is open.

    From then on `make stop` raises KeyboardInterrupt here.

    Raises InvalidSetting if the service runs already, or the folder belongs to another user.
    """
    try:
        KEYS.mkdir(exist_ok=True)
        KEYS.chmod(0o700)  # an older folder may be open to other users
        file = _RUNNING.open("a+")
    except OSError as error:
        raise InvalidSetting(f"{error}: {KEYS} must be a folder of yours; remove it") from error
    if not _lock(file):
        raise InvalidSetting("the service of this folder runs already: `make stop` stops it")
    signal.signal(STOP_SIGNAL, signal.default_int_handler)
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
    return file


def stop() -> int:
    """Stop this folder's service, and no other; return the exit status."""
    if not _RUNNING.exists():
        print("No service of this folder runs.")
        return 0
    with _RUNNING.open("r+") as file:
        if _lock(file):
            print("No service of this folder runs.")
            return 0
        os.kill(int(file.read()), STOP_SIGNAL)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            if _lock(file):
                print("Stopped.")
                return 0
            time.sleep(0.1)
    print(f"It has not stopped within {_STOP_S} s.", file=sys.stderr)
    return 1


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(stop())
