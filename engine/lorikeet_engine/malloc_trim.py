"""Returns memory that this process has freed to the operating system, through glibc.

Stands at the package's top, since the platform's gateways, which load no tensors, use it as well as
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
    """Return every free page of glibc's arenas to the system; without glibc do nothing.

    Without this, 410 MB of compiled grammars stayed with the process after they were freed.
    """
    if (library := glibc()) is not None:
        library.malloc_trim(0)
