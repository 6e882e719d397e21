"""The thread that writes what a process has counted."""

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
    """Writes a ledger's counts into the store every interval_s, and at the end.

    A write whose answer was lost is repeated under its own name until the store has it; what is
    counted meanwhile waits in the ledger. A process that is killed loses what it has counted since
    its last write. gather: called first each time, to add to the ledger what is counted elsewhere.
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
        self._numbers: Counter[date] = Counter()  # of the next object
        self._unwritten: deque[tuple[str, bytes]] = deque()
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-usage", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Write what there is and end; a store that takes longer does not get it."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def flush(self) -> bool:
        """Write what was counted until now; False if the store did not take it. For one thread."""
        self._gather()
        try:
            self._write()  # what an earlier flush could not
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
        with suppress(ObjectExists):  # an earlier try's answer was lost: nobody else has this name
            self._store.put_if_absent(key, data)
