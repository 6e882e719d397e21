"""Clock that tests move forward, so that they neither wait for deadlines nor miss one by chance."""

import time
from types import ModuleType
from typing import Any

import pytest


class MovedTime:
    """Replacement for the module `time` in other modules.

    ahead_s: seconds by which it is ahead of the real clock.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.ahead_s = 0.0
        for module in modules:
            patch.setattr(module, "time", self)

    def time(self) -> float:
        """Return Unix time plus ahead_s."""
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        """Return time.monotonic() plus ahead_s."""
        return time.monotonic() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
