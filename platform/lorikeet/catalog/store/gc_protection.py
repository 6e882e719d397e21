"""Lock-free protection of an object that a writer is about to name from garbage collection.

Garbage collection (garbage_collection.py) deletes objects that nothing names and that were last
written a day or more ago. A writer that wants to name such an object first touches it, then looks
for deletion marks. A collector first writes a mark, then reads the object's modification time. Each
side writes before it reads, so at least one side sees the other: the collector sees a recent object
and spares it, or the writer sees a mark and waits for the collector to finish.

A mark is not a lock: a live collector deletes only within DELETE_WITHIN_S seconds of its mark, so a
mark that a dead collector left is void after MARK_LASTS_S seconds.
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
"""Age in seconds up to which an object is safe without a touch.

The object's writer must name the object in a record within another NEW_S seconds, before garbage
collection may delete the object.
"""

_WAIT_S = 30.0
_POLL_S = 0.5


def protect(store: ObjectStore, key: str, put: Callable[[], None] | None = None) -> None:
    """Ensure that an object exists, and that garbage collection spares it for NEW_S seconds even if
    no record refers to it yet.

    key: key of the object.
    put: writes the object if it is absent. Without `put`, an absent object raises ObjectNotFound.

    Raises Conflict if a garbage collection is still about to delete the object after _WAIT_S
    seconds.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        _refresh(store, key, put)
        if not _is_marked(store, key):
            # A collector that marks from now on spares it; an earlier one may have deleted it.
            with suppress(ObjectNotFound):
                store.modified(key)
                return
        elif time.monotonic() > deadline:
            raise Conflict(f"{key} is being collected as garbage: try again in five minutes")
        else:
            time.sleep(_POLL_S)


@contextmanager
def marked_for_deletion(store: ObjectStore, keys: Sequence[str], run: str) -> Iterator[None]:
    """Mark objects as about to be deleted by garbage collection, until the `with` block ends.

    run: unique id of the garbage collection.
    """
    marks = [_marks_prefix(key) + run for key in keys]
    try:
        in_parallel(lambda mark: _put_mark(store, mark), marks)
        yield
    finally:
        in_parallel(store.delete, marks)


def _refresh(store: ObjectStore, key: str, put: Callable[[], None] | None) -> None:
    try:
        if store.modified(key) < time.time() - NEW_S:
            store.touch(key)
    except ObjectNotFound:
        if put is None:
            raise
        put()


def _put_mark(store: ObjectStore, mark: str) -> None:
    with suppress(ObjectExists):  # the answer to the first attempt was lost
        store.put_if_absent(mark, b"")


def _is_marked(store: ObjectStore, key: str) -> bool:
    dead = time.time() - MARK_LASTS_S
    return any(mark.modified > dead for mark in store.scan(_marks_prefix(key)))


def _marks_prefix(key: str) -> str:
    return f"{MARKS}{key.replace('/', '-')}."
