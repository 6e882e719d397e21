"""Store whose process dies at a chosen call."""

import threading
from typing import Any

from lorikeet.catalog.store.object_store import ObjectStore


class Crash(BaseException):
    """Death of the process."""


class Mortal:
    """Store whose process dies at its call number `calls`.

    after: whether the process dies right after the call, instead of before.
    """

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
