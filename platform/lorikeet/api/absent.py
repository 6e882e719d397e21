"""Names that were looked up in vain, for a moment."""

import time

_MOST = 4096


class Absent:
    """Remembers names for `lasting_s` seconds, and few of them: for one event loop."""

    def __init__(self, lasting_s: float) -> None:
        self._lasting_s = lasting_s
        self._until: dict[tuple[str, str], float] = {}

    def add(self, name: tuple[str, str]) -> None:
        """Remember that a name is absent now."""
        if len(self._until) >= _MOST:
            self._until.clear()
        self._until[name] = time.monotonic() + self._lasting_s

    def holds(self, name: tuple[str, str]) -> bool:
        """Whether this name was absent a moment ago."""
        return self._until.get(name, 0.0) > time.monotonic()
