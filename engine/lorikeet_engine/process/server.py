"""The process in which an engine runs: python -m lorikeet_engine.process.server."""

import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import EngineError
from lorikeet_engine.process.loop import EngineLoop
from lorikeet_engine.process.status_reporter import StatusReporter
from lorikeet_engine.process.wire import Outbox, Reply, receive, to_rows

_PR_SET_PDEATHSIG = 1
_SWITCH_S = 0.5e-3
"""So long a call waits for the interpreter while a step holds it; 5 ms by default."""


def main() -> None:
    """Serve one host to its end. Arguments: the descriptors of calls in and messages out."""
    if sys.platform == "linux":  # elsewhere the host's end is seen when no step hangs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.setswitchinterval(_SWITCH_S)
    calls_fd, messages_fd = map(int, sys.argv[1:])
    for fd in (calls_fd, messages_fd):
        os.set_inheritable(fd, False)
    outbox = Outbox(Connection(messages_fd, readable=False))
    try:
        _serve(Connection(calls_fd, writable=False), outbox)
    except EOFError:  # the host has closed us, or is no more
        outbox.close()
        os._exit(0)  # adapters may be loading in threads that the interpreter's end would break


def _serve(calls: Connection, outbox: Outbox) -> None:
    built = _reply(_build, calls)
    if built.error is not None:
        outbox.send(built)
        calls.recv_bytes()  # until the host closes us
    engine, step_timeout_s = built.result
    gc.collect()
    gc.freeze()  # what exists now stays: no collection walks through it in the middle of a step
    loop = EngineLoop(engine, lambda outputs: outbox.send(to_rows(outputs)), step_timeout_s)
    reporter = StatusReporter(engine, outbox.send)
    reporter.start()  # before our answer: who has that has a status
    outbox.send(Reply(engine.config))
    loop.start()
    try:
        while True:
            for method, *arguments in receive(calls):
                outbox.send(_reply(_METHODS[method], engine, *arguments))
    finally:
        reporter.close()
        loop.close()


def _build(calls: Connection) -> tuple[Engine, float]:
    ((build, step_timeout_s),) = receive(calls)  # the host calls nothing else before our answer
    return build(), step_timeout_s


_METHODS: Mapping[str, Callable[..., Any]] = {
    "submit": Engine.submit,
    "abort": Engine.abort,
    "pin": Engine.pin,
    "unpin": Engine.unpin,
    "prefetch": Engine.prefetch,
    "adapters": lambda engine, tier: tuple(map(tuple, engine.adapters(tier))),
    "take_use": Engine.take_use,
}


def _reply(call: Callable[..., Any], *arguments: Any) -> Reply:
    try:
        return Reply(call(*arguments))
    except Exception as error:
        return Reply(error=_portable(error))


def _portable(error: Exception) -> Exception:
    """The error with the stack that it has here, or one that says the same and can be pickled."""
    stack = "".join(traceback.format_exception(error))
    error.add_note(f"In the engine's process:\n{stack}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"in the engine's process:\n{stack}")
    return error


if __name__ == "__main__":
    main()
