"""Temporary folders for pushed blobs. Folders of a killed gateway are removed by the next gateway.

The folders lie on the file system of the replicas' disk cache, because a replica on the same
machine hard-links blobs into its cache.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from lorikeet.errors import StoreError

PushFolder = tempfile.TemporaryDirectory[str]
"""Temporary folder of one blob; cleanup() removes the folder and the blob."""
BLOB = "adapter.safetensors"
"""File name of a pushed blob in its temporary folder."""
_PREFIX = "pushes-"
_LOCK = "lock"


class PushFolders:
    """Temporary folders for pushed blobs, within one folder of this process.

    The process's folder stays locked while the process lives, so that other gateways do not remove
    it.
    """

    def __init__(self, parent: Path) -> None:
        """Remove the folders of dead gateways from `parent`.

        parent: folder of all gateways' folders on this host; need not exist.
        """
        self._parent = parent.absolute()
        self._own: tuple[Path, int] | None = None  # the folder, and the descriptor of its lock
        _remove_abandoned(self._parent)

    def make(self) -> PushFolder:
        """Make a folder for one blob. Raises StoreError if the file system refuses."""
        try:
            if self._own is None or not self._own[0].is_dir():  # a disk cleanup may have removed it
                self.close()
                self._own = self._open()
            return tempfile.TemporaryDirectory(dir=self._own[0])
        except OSError as error:
            raise StoreError(
                f"the gateway can keep no uploads in {self._parent} ({error.strerror}): let it "
                "write there, or free space, then send it again"
            ) from error

    def free_bytes(self) -> int:
        """Return the free bytes on the folders' file system. Call it only after `make` has
        succeeded.
        """
        return shutil.disk_usage(self._parent).free

    def _open(self) -> tuple[Path, int]:
        self._parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        locked = folder / "new"
        descriptor = os.open(locked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        locked.rename(folder / _LOCK)  # so the file never exists unlocked under this name
        return folder, descriptor

    def close(self) -> None:
        """Remove this process's folder with all blobs in it."""
        if self._own is not None:
            folder, descriptor = self._own
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
            self._own = None


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # of another user, or another gateway removes it at the same time
            descriptor = os.open(lock, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its owner lives
                shutil.rmtree(lock.parent)
            finally:
                os.close(descriptor)
