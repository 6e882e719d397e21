"""Compaction of a day's small usage objects into one, and deletion of the superseded objects.

No locks are taken, and a crash does no harm: a compacted object is written whole or not at all, and
lists the objects that it includes, so that a reader counts no object twice (object_format.py).
Superseded objects are deleted in a later run, when no reader can still be reading them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date

from lorikeet.catalog.store.object_store import ObjectStore, StoredObject
from lorikeet.errors import ObjectExists, StoreError
from lorikeet.usage.day_reader import DayReader
from lorikeet.usage.ledger import UsageAccount, day_of
from lorikeet.usage.object_format import (
    PREFIX,
    UsageContent,
    compacted_key,
    compacted_number,
    day_prefix,
    from_json,
    object_id,
    to_json,
)

_DAY_S = 86400.0
SPARED_S = 3600.0
"""Seconds for which superseded objects stay, because readers that listed them may still
read them.
"""


def compact_day(store: ObjectStore, day: date) -> None:
    """Write one compacted object with all of a day's usage so far, if usage was stored since the
    last compacted object. Raises StoreError.
    """
    read = DayReader[UsageAccount](store, day, key=lambda account: account)
    use = read.read()
    if not read.objects:
        return
    key = compacted_key(day, 1 if read.compacted is None else read.compacted + 1)
    with suppress(ObjectExists):  # a concurrent process has compacted the day
        store.put_if_absent(key, to_json(UsageContent(use, read.marks)))


def compact_recent_days(store: ObjectStore, now: float) -> None:
    """Write compacted objects (each with all of a day's usage) for yesterday and today so far.

    Raises StoreError.

    now: Unix seconds.
    """
    for at in (now - _DAY_S, now):
        compact_day(store, day_of(at))


def superseded(store: ObjectStore, day: date, before: float) -> Iterator[StoredObject]:
    """Yield a day's objects whose usage the newest compacted object written before `before`
    includes. Raises StoreError.

    before: Unix seconds.
    """
    found = list(store.scan(day_prefix(day)))
    compacted = {
        n: one for one in found if (n := compacted_number(one.key)) and one.modified < before
    }
    if not compacted:
        return
    newest = compacted[max(compacted)]
    marks = from_json(store.get(newest.key), newest.key).marks
    for one in found:
        written, number = object_id(one.key), compacted_number(one.key)
        held = (
            written is not None
            and written.writer in marks
            and written.number <= marks[written.writer]
        )
        if held or (number is not None and number < max(compacted)):
            yield one


def days_with_usage(store: ObjectStore) -> Iterator[date]:
    """Yield the days that have usage, in order: one LIST per day. Raises StoreError."""
    key = store.first(PREFIX)
    while key is not None:
        try:
            day = date.fromisoformat(key.removeprefix(PREFIX).partition("/")[0])
        except ValueError as error:
            raise StoreError(f"{store.url}: {key} belongs to no day of usage: remove it") from error
        yield day
        key = store.first(PREFIX, f"{day_prefix(day)}~")


def clean_up(
    store: ObjectStore, now: Callable[[], float], *, dry_run: bool
) -> Iterator[StoredObject]:
    """Compact finished days, and delete the objects that compacted objects older than SPARED_S
    seconds include; yield each deleted object.

    now: clock that returns Unix seconds.
    dry_run: write and delete nothing; yield the objects that would be deleted.

    Raises StoreError.
    """
    today = day_of(now())
    for day in days_with_usage(store):
        for one in list(superseded(store, day, now() - SPARED_S)):
            if not dry_run:
                store.delete(one.key)
            yield one
        if day < today and not dry_run:
            compact_day(store, day)
