"""Writer thread that stores the usage which a process has counted."""

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import ObjectExists, StoreError
from lorikeet.usage.ledger import UsageByAccount, UsageLedger
from lorikeet.usage.object_format import UsageContent, UsageObjectId, object_key, to_json

log = logging.getLogger(__name__)


class UsageWriter:
    """Thread that writes a ledger to the store every interval_s, and once more at the end.

    A write whose answer was lost is repeated under the same key until the store has the object;
    newer counts wait in the ledger. A process that is killed loses the counts since its last write.

    interval_s: seconds between writes.
    gather: called before each write, to add counts from elsewhere to the ledger.
    clock: Unix seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        ledger: UsageLedger,
        interval_s: float,
        gather: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._ledger, self._gather, self._clock = store, ledger, gather, clock
        self._interval_s = interval_s
        self._writer = secrets.token_hex(8)
        self._numbers: Counter[date] = Counter()  # number of the day's next object
        self._unwritten: deque[tuple[str, bytes]] = deque()
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-usage", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Write the remaining counts and stop the thread.

        within_s: seconds to wait; the counts are lost if the store takes longer.
        """
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def flush(self) -> bool:
        """Write all counts so far; return False if the store failed. Single thread."""
        self._gather()
        try:
            self._write()  # objects that an earlier flush failed to write
            self._unwritten += [self._encoded(*day_use) for day_use in self._ledger.take().items()]
            self._write()
        except StoreError as error:
            if not self._failing:
                log.warning("usage_not_written", extra={"error": str(error)})
            self._failing = True
            return False
        self._failing = False
        return True

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self.flush()
        except Exception:
            log.exception("usage_flush_failed")

    def _encoded(self, day: date, use: UsageByAccount) -> tuple[str, bytes]:
        written = UsageObjectId(self._writer, self._numbers[day])
        self._numbers[day] += 1
        return object_key(day, written, self._clock()), to_json(UsageContent(use))

    def _write(self) -> None:
        while self._unwritten:
            self._put(*self._unwritten[0])
            self._unwritten.popleft()

    def _put(self, key: str, data: bytes) -> None:
        with suppress(ObjectExists):  # by an earlier attempt: the key is this writer's own
            self._store.put_if_absent(key, data)
