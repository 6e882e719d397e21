"""Gives memory that this process has freed back to the operating system, through glibc."""

import ctypes
import functools


@functools.cache
def glibc() -> ctypes.CDLL | None:
    """Return this process's C library if it has malloc_trim, as glibc does, else None."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def trim_malloc() -> None:
    """Give every free page of glibc's arenas back to the operating system.

    Does nothing without glibc.
    """
    if (library := glibc()) is not None:
        library.malloc_trim(0)
