"""Where a gateway keeps pushed blobs: a folder that the next one removes if this one is killed.

It lies beside the replicas' disk cache: one on the same machine links a blob from there into it,
which does not work from another file system.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from lorikeet.errors import StoreError

PushFolder = tempfile.TemporaryDirectory[str]
"""One blob's, which goes with it."""
BLOB = "adapter.safetensors"
"""What that is called in it."""
_PREFIX = "pushes-"
_LOCK = "lock"


class PushFolders:
    """Temporary folders in one of this process's own, which it holds a lock of while it lives."""

    def __init__(self, parent: Path) -> None:
        """Remove what gateways that are no more have left in `parent`, which need not exist."""
        self._parent = parent.absolute()
        self._own: tuple[Path, int] | None = None  # the folder, and the descriptor of its lock
        _remove_abandoned(self._parent)

    def make(self) -> PushFolder:
        """Make a folder for one blob, whose cleanup removes it.

        Raises StoreError where that cannot be.
        """
        try:
            if self._own is None or not self._own[0].is_dir():  # who tidies the disk has removed it
                self.close()
                self._own = self._open()
            return tempfile.TemporaryDirectory(dir=self._own[0])
        except OSError as error:
            raise StoreError(
                f"the gateway can keep no uploads in {self._parent} ({error.strerror}): let it "
                "write there, or free space, then send it again"
            ) from error

    def _open(self) -> tuple[Path, int]:
        self._parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        locked = folder / "new"
        descriptor = os.open(locked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        locked.rename(folder / _LOCK)  # who finds it finds it locked
        return folder, descriptor

    def close(self) -> None:
        """Remove all of them."""
        if self._own is not None:
            folder, descriptor = self._own
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
            self._own = None


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another's, or another gateway is as quick
            descriptor = os.open(lock, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while it lives
                shutil.rmtree(lock.parent)
            finally:
                os.close(descriptor)
