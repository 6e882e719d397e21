"""Compacts a day's many small usage objects into one, and deletes those that it supersedes.

Nothing is locked and a crash leaves nothing wrong: a compacted object is written whole or not at
all, and says which objects it holds, so that readers of both count them once (object_format.py).
What it supersedes is deleted in a later run, when nobody can still be reading it.
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
"""Seconds for which objects stay once compacted, for readers who listed them before."""


def compact_day(store: ObjectStore, day: date) -> None:
    """Write one object with all of a day, unless there is one. Raises StoreError."""
    read = DayReader[UsageAccount](store, day, key=lambda account: account)
    use = read.read()
    if not read.objects:
        return
    key = compacted_key(day, 1 if read.compacted is None else read.compacted + 1)
    with suppress(ObjectExists):  # somebody else joins them too
        store.put_if_absent(key, to_json(UsageContent(use, read.marks)))


def compact_recent_days(store: ObjectStore, now: float) -> None:
    """What was written for today and yesterday, until now, in Unix seconds. Raises StoreError."""
    for at in (now - _DAY_S, now):
        compact_day(store, day_of(at))


def superseded(store: ObjectStore, day: date, before: float) -> Iterator[StoredObject]:
    """Yield the objects that one compacted before then (Unix seconds) holds. Raises StoreError."""
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
    """Yield days in order, with one question to the store for each. Raises StoreError."""
    key = store.first(PREFIX)
    while key is not None:
        try:
            day = date.fromisoformat(key.removeprefix(PREFIX).partition("/")[0])
        except ValueError as error:
            raise StoreError(f"{store.url}: {key} is no day's usage: remove it") from error
        yield day
        key = store.first(PREFIX, f"{day_prefix(day)}~")


def clean_up(
    store: ObjectStore, now: Callable[[], float], *, dry_run: bool
) -> Iterator[StoredObject]:
    """Join the days that are over, and delete what is superseded by now.

    now: Unix seconds. The answer is what is deleted, or would be. Raises StoreError.
    """
    today = day_of(now())
    for day in days_with_usage(store):
        for one in list(superseded(store, day, now() - SPARED_S)):
            if not dry_run:
                store.delete(one.key)
            yield one
        if day < today and not dry_run:
            compact_day(store, day)
