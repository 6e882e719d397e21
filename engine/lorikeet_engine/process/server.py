"""The process in which an engine runs: python -m lorikeet_engine.process.server.

The main thread takes client.py's calls and replies to them. An EngineLoop (loop.py) steps the
engine on a thread of its own, and what each step brings goes back to client.py through wire.py.
"""

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
from lorikeet_engine.process.wire import MessageSender, Reply, receive, to_rows

_PR_SET_PDEATHSIG = 1
_SWITCH_S = 0.5e-3
"""How long a call waits for the interpreter while a step holds it; 5 ms by default."""


def main() -> None:
    """Serve one client to its end. Arguments: the descriptors of calls in and messages out."""
    if sys.platform == "linux":  # elsewhere the client's end is seen when no step hangs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.setswitchinterval(_SWITCH_S)
    calls_fd, messages_fd = map(int, sys.argv[1:])
    for fd in (calls_fd, messages_fd):
        os.set_inheritable(fd, False)
    sender = MessageSender(Connection(messages_fd, readable=False))
    try:
        _serve(Connection(calls_fd, writable=False), sender)
    except EOFError:  # the client has closed us, or is no more
        sender.close()
        os._exit(0)  # adapters may be loading in threads that the interpreter's end would break


def _serve(calls: Connection, sender: MessageSender) -> None:
    built = _reply(_build, calls)
    if built.error is not None:
        sender.send(built)
        calls.recv_bytes()  # until the client closes us
    engine, step_timeout_s = built.result
    gc.collect()
    gc.freeze()  # what exists now stays: no collection walks through it in the middle of a step
    loop = EngineLoop(engine, lambda outputs: sender.send(to_rows(outputs)), step_timeout_s)
    reporter = StatusReporter(engine, sender.send)
    reporter.start()  # before our reply, so that a client with that has a status
    sender.send(Reply(engine.info))
    loop.start()
    try:
        while True:
            for method, *arguments in receive(calls):
                sender.send(_reply(_METHODS[method], engine, *arguments))
    finally:
        reporter.close()
        loop.close()


def _build(calls: Connection) -> tuple[Engine, float]:
    ((build, step_timeout_s),) = receive(calls)  # the client calls nothing else before our reply
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
