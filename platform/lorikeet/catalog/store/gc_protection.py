"""Keeps an object that is about to be named from being deleted as garbage, without a lock.

Collection deletes what nothing needs and nobody has written for a day or more
(garbage_collection.py). A writer that wants to name such an object makes it new first (`touch`),
then looks for a mark of it. A collector marks it first, then looks how old it is. Each writes
before it reads, so at least one sees the other: the collector a new object, which it spares, or
the writer a mark, and then it waits for what the collector does. No mark is a lock: one that a
dead collector left means nothing after MARK_LASTS_S, since a living one deletes only in the first
DELETE_WITHIN_S.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import Conflict, ObjectExists, ObjectNotFound

MARKS = "collecting/"
MARK_LASTS_S = 300.0
DELETE_WITHIN_S = 60.0
NEW_S = 12 * 3600.0
"""An object written as recently as this needs no touch; its writer names it within as long."""

_WAIT_S = 30.0
_POLL_S = 0.5


def protect(store: ObjectStore, key: str, put: Callable[[], None] | None = None) -> None:
    """Make sure that an object exists and stays for NEW_S even if nothing names it yet.

    put: writes it when it is absent; None raises ObjectNotFound. Raises Conflict while a
    collection holds it.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        _renew(store, key, put)
        if not _marked(store, key):
            # Whoever marks it from now on spares it; one before may just have deleted it.
            with suppress(ObjectNotFound):
                store.modified(key)
                return
        elif time.monotonic() > deadline:
            raise Conflict(f"{key} is being collected as garbage: try again in five minutes")
        else:
            time.sleep(_POLL_S)


@contextmanager
def marked_for_deletion(store: ObjectStore, keys: Sequence[str], run: str) -> Iterator[None]:
    """Mark these objects as about to be deleted. run: one collector's name and no other's."""
    marks = [_marks(key) + run for key in keys]
    try:
        in_parallel(lambda mark: _put(store, mark), marks)
        yield
    finally:
        in_parallel(store.delete, marks)


def _renew(store: ObjectStore, key: str, put: Callable[[], None] | None) -> None:
    try:
        if store.modified(key) < time.time() - NEW_S:
            store.touch(key)
    except ObjectNotFound:
        if put is None:
            raise
        put()


def _put(store: ObjectStore, mark: str) -> None:
    with suppress(ObjectExists):  # the answer to the first try was lost
        store.put_if_absent(mark, b"")


def _marked(store: ObjectStore, key: str) -> bool:
    dead = time.time() - MARK_LASTS_S
    return any(mark.modified > dead for mark in store.scan(_marks(key)))


def _marks(key: str) -> str:
    return f"{MARKS}{key.replace('/', '-')}."
