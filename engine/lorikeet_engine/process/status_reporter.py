"""The thread that reports an engine's status when it has changed."""

import logging
import threading
from collections.abc import Callable

from lorikeet_engine.engine import Engine
from lorikeet_engine.telemetry.status import EngineStatus

log = logging.getLogger(__name__)

_MIN_INTERVAL_S = 0.1  # between two reports
# Waits, and the uses of adapters that are not used, change without an event.
_POLL_S = 1.0


class StatusReporter:
    """Reports a changed status: at once after a quiet time, then once in a tenth of a second.

    `report` is called by `start`, with every adapter that is nearer than remote in `moved`; then on
    this thread, with each status that differs from the one before. It must not block.
    """

    def __init__(self, engine: Engine, report: Callable[[EngineStatus], None]) -> None:
        self._engine, self._report = engine, report
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-reporter", daemon=True)

    def start(self) -> None:
        """Report once, and begin to watch for changes."""
        self._report_changes()
        self._thread.start()

    def close(self) -> None:
        """Report no more."""
        self._closing.set()
        self._engine.changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_MIN_INTERVAL_S):
            self._engine.changed.wait(_POLL_S)
            self._engine.changed.clear()
            try:
                self._report_changes()
            except Exception:
                log.exception("status_not_reported")

    def _report_changes(self) -> None:
        status = self._engine.changed_status()
        if status is not None:
            self._report(status)
