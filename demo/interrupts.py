"""Ctrl-C while a program's modules are imported, which takes seconds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_by_sigint() -> Iterator[None]:
    """Let SIGINT end the process meanwhile, and print no traceback, unless it is ignored.

    KeyboardInterrupt would show where the imports were; raised in a callback of theirs it is lost.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
