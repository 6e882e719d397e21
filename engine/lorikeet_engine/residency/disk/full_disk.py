"""What a full or broken disk looks like, and a file in memory for what it cannot take."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


def is_disk_trouble(error: BaseException | None) -> bool:
    """Whether the cause is this machine's disk, so that another engine might load the adapter."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TROUBLE:
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def memory_file() -> Iterator[Path]:
    """Make an empty file in this process's memory, which is freed at the end. Linux alone has such.

    Raises OSError.
    """
    descriptor = os.memfd_create("adapter")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
