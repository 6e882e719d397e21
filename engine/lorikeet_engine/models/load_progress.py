"""Log of a checkpoint's loading, for loads that take seconds."""

import logging
import threading
import time

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class LoadProgress:
    """Counter of the bytes read from a checkpoint. Thread-safe.

    Logs the event weights_loading once a second: read_bytes so far, and total_bytes.

    total_bytes: approximate number of bytes to read; 0: log nothing.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes, self._read_bytes = total_bytes, 0
        self._logged_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes as read."""
        with self._lock:
            self._read_bytes += count
            now_s = time.monotonic()
            if not self._total_bytes or now_s < self._logged_s + _INTERVAL_S:
                return
            self._logged_s = now_s
            facts = {"read_bytes": self._read_bytes, "total_bytes": self._total_bytes}
        log.info("weights_loading", extra=facts)
