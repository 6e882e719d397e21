"""Where a gateway keeps pushed blobs: a folder that the next one removes if this one is killed."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PushFolder = tempfile.TemporaryDirectory[str]
"""One blob's, which goes with it."""
BLOB = "adapter.safetensors"
"""What that is called in it."""
_PREFIX = "lorikeet-pushes-"
_LOCK = "lock"


class PushFolders:
    """Temporary folders in one of this process's own, which it holds a lock of while it lives."""

    def __init__(self) -> None:
        """Remove what gateways of this machine that are no more have left."""
        _remove_abandoned()
        self._open()

    def _open(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        locked = self._folder / "new"
        self._descriptor = os.open(locked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        locked.rename(self._folder / _LOCK)  # who finds it finds it locked

    def make(self) -> PushFolder:
        """Make a folder for one blob, whose cleanup removes it."""
        try:
            return tempfile.TemporaryDirectory(dir=self._folder)
        except FileNotFoundError:  # who tidies /tmp has removed it
            os.close(self._descriptor)
            self._open()
            return tempfile.TemporaryDirectory(dir=self._folder)

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._descriptor)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another's, or another gateway is as quick
            descriptor = os.open(lock, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while it lives
                shutil.rmtree(lock.parent)
            finally:
                os.close(descriptor)
