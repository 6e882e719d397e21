"""Gives memory that this process has freed back to the operating system, through glibc.

Lies at the package's top because the platform's gateways, which load no tensors, use it as well as
the engine.
"""

import ctypes
import functools


@functools.cache
def glibc() -> ctypes.CDLL | None:
    """Return this process's C library if it has malloc_trim, as glibc does, else None."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def trim_malloc() -> None:
    """Give every free page of glibc's arenas back to the operating system.

    Does nothing without glibc. Without this call, 410 MB of compiled grammars stayed with the
    process after they were freed.
    """
    if (library := glibc()) is not None:
        library.malloc_trim(0)
