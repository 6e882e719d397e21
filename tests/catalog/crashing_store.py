"""A store under a process that dies."""

import threading
from typing import Any

from lorikeet.catalog.store.object_store import ObjectStore


class Crash(BaseException):
    """The process ends here."""


class Mortal:
    """A store whose process ends before or after its n-th call."""

    def __init__(self, store: ObjectStore, calls: int, *, after: bool) -> None:
        self._store = store
        self._left = calls
        self._after = after
        self._counting = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*arguments: Any) -> Any:
            with self._counting:  # the threads of one process die together
                self._left -= 1
                left = self._left
            if left < 0 or (left == 0 and not self._after):
                raise Crash
            answer = method(*arguments)
            if left == 0:
                raise Crash
            return answer

        return call
