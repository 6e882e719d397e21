"""Changing a catalog.

A change is one optimistic loop: read the log's tail, check against the state, append. When
someone else appended first, the loop starts over, so no update is lost and nothing is decided on
stale knowledge. A crash leaves at most a blob that no entry names, or parts of a snapshot.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import Self

from lorikeet.catalog.log.apply import apply_entries
from lorikeet.catalog.log.changes import CatalogCreated
from lorikeet.catalog.rules.adapters import Changes
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.catalog.view import CatalogReader
from lorikeet.errors import Conflict

_ATTEMPTS = 60  # with sixteen writers at once, one in fifty would give up
_LONGEST_PAUSE_S = 1.0


class CatalogWriter(CatalogReader):
    """One optimistic loop for every operation. clock: Unix seconds."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        super().__init__(store)
        self._clock = clock
        self._writing = threading.Lock()  # one process need not race with itself

    @classmethod
    def init(
        cls, store: ObjectStore, *, actor: str = "init", clock: Callable[[], float] = time.time
    ) -> Self:
        """Make the catalog of an empty store. Raises Conflict when there is one."""
        catalog = cls(store, clock)
        try:
            entry = catalog._log.append(0, actor, clock(), [CatalogCreated()])
        except Conflict as error:
            raise Conflict(f"there already is a catalog at {store.url}") from error
        catalog.advance([entry])
        return catalog

    def _commit(self, actor: str, decide: Callable[[CatalogState], Changes]) -> CatalogState:
        """Append what `decide` answers; the state right after it, or as it is without changes."""
        asked_s = time.monotonic()
        with self._writing:
            for attempt in range(_ATTEMPTS):
                self.refresh(asked_s)
                state, changes = self.ask(lambda state: (state, decide(state)))
                if not changes:
                    return state
                try:
                    entry = self._log.append(state.seq, actor, self._clock(), changes)
                except Conflict:
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.05 * 2**attempt)))
                    continue
                self.advance([entry])
                return apply_entries(state, [entry])
        raise Conflict(
            f"others changed the catalog first, {_ATTEMPTS} times in a row: try again later"
        )
