"""Store that tests make unavailable or slow, as a network would."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreError


class RemoteStore(LocalStore):
    """Local store with faults that tests switch on.

    is_away: every call fails.
    takes_blobs: uploads succeed.
    hanging: number of uploads that are waiting.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_away = False
        self.takes_blobs = True
        self.hanging = 0
        self._uploads_allowed = threading.Event()
        self._uploads_allowed.set()

    def first(self, prefix: str, start_after: str = "") -> str | None:
        self._check()
        return super().first(prefix, start_after)

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        self._check()
        return super().list(prefix, start_after)

    def get(self, key: str) -> bytes:
        self._check()
        return super().get(key)

    def put_file(self, key: str, path: Path) -> None:
        self._check()
        if not self.takes_blobs:
            raise StoreError("the store takes no blobs")
        self.hanging += 1
        self._uploads_allowed.wait()
        self.hanging -= 1
        super().put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._check()
        super().put_if_absent(key, data)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Fail every call inside the `with` block."""
        self.is_away = True
        try:
            yield
        finally:
            self.is_away = False

    @contextmanager
    def hangs(self) -> Iterator[None]:
        """Hold uploads until the end of the `with` block."""
        self._uploads_allowed.clear()
        try:
            yield
        finally:
            self._uploads_allowed.set()

    def _check(self) -> None:
        if self.is_away:
            raise StoreError("the store does not answer")
