"""Handling of Ctrl-C while a program imports its modules, which takes seconds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_by_sigint() -> Iterator[None]:
    """Let SIGINT kill the process within the block, without a traceback, unless SIGINT is ignored.

    A KeyboardInterrupt would print where the imports are, and would be lost if raised in a
    callback.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
