"""Handling of Ctrl-C while a program imports its modules or downloads, which takes seconds."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_by_sigint() -> Iterator[None]:
    """Let SIGINT kill the process within the block, without a traceback, unless SIGINT is ignored,
    the program has a handler of its own, or this is not the main thread.

    A KeyboardInterrupt would print a traceback of the imports, and is lost if raised in a callback.
    """
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
