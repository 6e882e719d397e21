"""Time that a test moves on, so that it waits for no deadline, nor misses one unawares."""

import time
from types import ModuleType
from typing import Any

import pytest


class MovedTime:
    """Stands in for the module `time` in other modules; ahead_s: how far it is ahead of it."""

    def __init__(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.ahead_s = 0.0
        for module in modules:
            patch.setattr(module, "time", self)

    def time(self) -> float:
        """Unix time, moved."""
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        """As time's, moved."""
        return time.monotonic() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
