"""Wakes the engine when only time has to pass."""

import threading
import time
from collections.abc import Callable


class Alarm:
    """Calls `ring` once, at the earliest time asked for. Belongs to one thread."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: threading.Timer | None = None
        self._rings_at_s = 0.0

    def within(self, delay_s: float) -> None:
        """Ring after delay_s, or before."""
        now_s = time.monotonic()
        at_s = now_s + delay_s
        # A timer whose time has come rings once more at most, perhaps before we were called.
        if self._timer is not None and now_s < self._rings_at_s <= at_s:
            return
        self.cancel()
        self._timer, self._rings_at_s = threading.Timer(delay_s, self._ring), at_s
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
