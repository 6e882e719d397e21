"""Joins a day's many small objects into one, and finds what that has made superseded.

Nothing is locked and a crash leaves nothing wrong: a joined object is written whole or not at all,
and says which parts it holds, so that whoever reads both counts them once (files.py). What it has
made superseded goes in a later run, when nobody can still be reading it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date

from lorikeet.catalog.store.object_store import ObjectStore, StoredObject
from lorikeet.errors import ObjectExists, StoreError
from lorikeet.usage.counts import UsageAccount, day_of
from lorikeet.usage.day_reader import DayReader
from lorikeet.usage.object_format import (
    PREFIX,
    UsageContent,
    day_prefix,
    from_json,
    joined_key,
    joined_number,
    part_of,
    to_json,
)

_DAY_S = 86400.0
SPARED_S = 3600.0
"""So long after parts were joined they stay, for those who listed them before."""


def compact_day(store: ObjectStore, day: date) -> None:
    """Write one object with all of a day, unless there is one. Raises StoreError."""
    read = DayReader[UsageAccount](store, day, key=lambda account: account)
    use = read.read()
    if not read.parts:
        return
    key = joined_key(day, 1 if read.joined is None else read.joined + 1)
    with suppress(ObjectExists):  # somebody else joins them too
        store.put_if_absent(key, to_json(UsageContent(use, read.marks)))


def compact_recent_days(store: ObjectStore, now: float) -> None:
    """What was written for today and yesterday, until now, in Unix seconds. Raises StoreError."""
    for at in (now - _DAY_S, now):
        compact_day(store, day_of(at))


def superseded(store: ObjectStore, day: date, before: float) -> Iterator[StoredObject]:
    """What an object that was joined before then, in Unix seconds, holds too. Raises StoreError."""
    found = list(store.scan(day_prefix(day)))
    joined = {n: one for one in found if (n := joined_number(one.key)) and one.modified < before}
    if not joined:
        return
    newest = joined[max(joined)]
    marks = from_json(store.get(newest.key), newest.key).marks
    for one in found:
        part, number = part_of(one.key), joined_number(one.key)
        held = part is not None and part.writer in marks and part.number <= marks[part.writer]
        if held or (number is not None and number < max(joined)):
            yield one


def days_with_usage(store: ObjectStore) -> Iterator[date]:
    """In order; one question to the store for each. Raises StoreError."""
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
