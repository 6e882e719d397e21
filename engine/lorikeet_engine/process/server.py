"""Process in which an engine runs: python -m lorikeet_engine.process.server.

The main thread takes the calls of client.py and replies to them. An EngineLoop steps the engine on
a thread of its own; the outputs of each step go back to client.py through wire.py. A StatusReporter
sends the status on a third thread, as a sign that the engine works.
"""

import ctypes
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import DeviceLost, EngineError, StepFailed
from lorikeet_engine.process.watchdog import Watchdog, end_process
from lorikeet_engine.process.wire import MessageSender, Reply, receive, to_rows
from lorikeet_engine.request import Output
from lorikeet_engine.telemetry.status import EngineStatus

# Named explicitly, for programs that set handlers: as the main module, __name__ is "__main__".
log = logging.getLogger("lorikeet_engine.process.server")

_PR_SET_PDEATHSIG = 1
_SWITCH_S = 0.5e-3
"""Longest time, in seconds, that a call waits for Python's interpreter lock while a step holds it.

Python's default is 5 ms.
"""
_MIN_REPORT_INTERVAL_S = 0.1  # between two reports
_HEARTBEAT_S = 0.5  # longest time between two reports of an engine that works
_LONG_STEP_S = 5.0
"""Seconds after which a step on a GPU counts as not working.

Steps on GPUs take at most about a second: prompts are computed in parts, and no kernel is compiled
in a step. Steps on CPUs may take any time.
"""


def main() -> None:
    """Serve one client until the client closes its pipe or dies.

    Command line: file descriptors of the pipe for calls in and of the pipe for messages out.
    """
    if sys.platform == "linux":  # on other systems this process outlives its client if a step hangs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.setswitchinterval(_SWITCH_S)
    calls_fd, messages_fd = map(int, sys.argv[1:])
    for fd in (calls_fd, messages_fd):
        os.set_inheritable(fd, False)
    sender = MessageSender(Connection(messages_fd, readable=False))
    try:
        _serve(Connection(calls_fd, writable=False), sender)
    except EOFError:  # the client has closed the pipe, or has died
        sender.close()
        os._exit(0)  # at once: ending the interpreter would break threads that load adapters


def _serve(calls: Connection, sender: MessageSender) -> None:
    built = _reply(_build, calls)
    if built.error is not None:
        sender.send(built)
        calls.recv_bytes()  # returns when the client closes the pipe
    engine, step_timeout_s = built.result
    gc.collect()
    gc.freeze()  # objects that exist now stay: no collection in a step walks through them
    _leave_cores()
    loop = EngineLoop(engine, lambda outputs: sender.send(to_rows(outputs)), step_timeout_s)
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    longest_s = _LONG_STEP_S if on_gpu else step_timeout_s
    reporter = StatusReporter(engine, sender.send, lambda: loop.step_s < longest_s)
    reporter.start()  # before the reply: a client that has the reply has a status, too
    sender.send(Reply(engine.info))
    loop.start()
    try:
        while True:
            for method, *arguments in receive(calls):
                sender.send(_reply(_METHODS[method], engine, *arguments))
    finally:
        reporter.close()
        loop.close()


def _leave_cores() -> None:
    """Let torch use no CPU threads of its own if the engine runs on a GPU.

    Otherwise each thread that packs adapters would have one torch thread per core, which waits in
    busy loops.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)


def _build(calls: Connection) -> tuple[Engine, float]:
    ((build, step_timeout_s),) = receive(calls)  # the client makes no other call before the reply
    return build(), step_timeout_s


_METHODS: Mapping[str, Callable[..., Any]] = {
    "submit": Engine.submit,
    "abort": Engine.abort,
    "residency": Engine.residency,
    "pin": Engine.pin,
    "unpin": Engine.unpin,
    "keep_prompts": Engine.keep_prompts,
    "prefetch": Engine.prefetch,
    "forget": Engine.forget,
    "expect": lambda engine, *arguments: engine.incoming_blobs.begin(*arguments),
    "adapters": lambda engine, tier: tuple(map(tuple, engine.adapters(tier))),
    "take_use": Engine.take_use,
}


class EngineLoop:
    """Thread that steps an engine as long as there is work, and passes outputs to `on_outputs`.

    on_outputs: called on this thread with the outputs of every step that has any, and once more by
        `close` on the caller's thread. Must not block.
    step_timeout_s: time after which a step counts as hanging.

    The process is ended if no later step could work: if a step exceeds step_timeout_s, if the
    device is lost, or if the engine, after an error of its own code, cannot fail all requests and
    begin anew.
    """

    def __init__(
        self, engine: Engine, on_outputs: Callable[[list[Output]], None], step_timeout_s: float
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._watchdog = Watchdog(step_timeout_s, engine.status)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-engine", daemon=True)

    @property
    def step_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        return self._watchdog.step_s

    def start(self) -> None:
        """Start the thread that steps the engine, and the watchdog."""
        self._watchdog.start()
        self._thread.start()

    def close(self) -> None:
        """Finish the current step, fail open requests with EngineClosed, and close the engine."""
        self._closing.set()
        self._engine.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._watchdog.stop()
        self._deliver(self._engine.close())

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._engine.wait()
                with self._watchdog:
                    outputs = self._step()
                self._deliver(outputs)
        except DeviceLost as error:
            end_process("device_lost", error=error.message)
        except BaseException as error:
            end_process("engine_lost", error=repr(error))

    def _step(self) -> list[Output]:
        try:
            return self._engine.step()
        except DeviceLost:
            raise
        except Exception as error:
            # Raised by the engine's own code, not the forward pass: its state may be wrong by now.
            log.exception("engine_state_lost")
            failure = StepFailed(f"the engine began anew after {type(error).__name__}")
            return self._engine.fail_all(failure)

    def _deliver(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        try:
            self._on_outputs(outputs)
        except Exception:
            log.exception("outputs_undelivered", extra={"outputs": len(outputs)})


class StatusReporter:
    """Thread that reports an engine's status, at least every _HEARTBEAT_S while the engine works.

    A change is reported at once, or a tenth of a second after the last report if that is later.

    report: called with each status. Must not block. The first call is made by `start`, and its
        `moved` (adapters that changed tier) has every adapter on the GPU, in host memory or on the
        disk; later calls are made on this thread.
    works: returns whether the engine works, that is, whether no step has taken too long. Nothing is
        reported while it returns False.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[[EngineStatus], None],
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        self._engine, self._report, self._works = engine, report, works
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-reporter", daemon=True)

    def start(self) -> None:
        """Report the status once, then start the thread that reports it again."""
        self._report(self._engine.report())
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; no status is reported afterwards."""
        self._closing.set()
        self._engine.changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_MIN_REPORT_INTERVAL_S):
            self._engine.changed.wait(_HEARTBEAT_S)
            self._engine.changed.clear()
            try:
                if self._works():
                    self._report(self._engine.report())
            except Exception:
                log.exception("status_not_reported")


def _reply(call: Callable[..., Any], *arguments: Any) -> Reply:
    try:
        return Reply(call(*arguments))
    except Exception as error:
        return Reply(error=_portable(error))


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled and shows the stack of the engine's process.

    The result is the error itself with the stack as a note, or an EngineError with the stack as its
    message if the error cannot be pickled.
    """
    stack = "".join(traceback.format_exception(error))
    error.add_note(f"In the engine's process:\n{stack}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"in the engine's process:\n{stack}")
    return error


if __name__ == "__main__":
    main()
