"""Watchdog that ends the engine's process when a step hangs; the client notices that it ended."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lorikeet_engine.telemetry.status import EngineStatus

log = logging.getLogger(__name__)

_STDERR = 2  # not sys.stderr, which may have been replaced by an object without a file
_CHECKS = 20  # checks of a step during its timeout


class Watchdog:
    """Thread that ends the process when a step takes longer than timeout_s.

    Use `with watchdog:` around each step. The process ends even if the stepping thread hangs in a
    call that never returns.

    status: returns the engine's status, which is logged before the process ends.
    """

    def __init__(self, timeout_s: float, status: Callable[[], EngineStatus]) -> None:
        self._timeout_s = timeout_s
        self._status = status
        self._began_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread that watches the steps."""
        self._postpone_exit()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that watches the steps."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def step_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began_s = None

    def _run(self) -> None:
        while not self._stopped.wait(self._timeout_s / _CHECKS):
            self._postpone_exit()
            if (step_s := self.step_s) > self._timeout_s:
                self._end(step_s)
        faulthandler.cancel_dump_traceback_later()

    def _postpone_exit(self) -> None:
        # An exit that needs no interpreter. It is postponed at each check, so it happens only if a
        # step hangs while holding the interpreter's lock, or a lock that the status needs.
        faulthandler.dump_traceback_later(1.5 * self._timeout_s, exit=True, file=_STDERR)

    def _end(self, lasted_s: float) -> NoReturn:
        live = self._status().live
        end_process(
            "step_hangs",
            seconds=round(lasted_s, 1),
            running=live.running,
            waiting=live.waiting,
            kv_pages_used=live.kv_pages_used,
        )


def end_process(event: str, **fields: Any) -> NoReturn:
    """Log a critical event and the stacks of all threads; end the process with status 1."""
    log.critical(event, extra=fields)
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    os._exit(1)
