"""The objects that hold usage: their names and what is in them.

A process writes one object after the other for each day: number n once n − 1 is there, under a
name that holds the process's own id, and if absent, so that a repeated write changes nothing. In
the order of names come a day's objects by the time at which they were made, then the compacted
ones. A compacted object holds all that is in the one before it, and for each writer the number of
the last object that it holds: what it holds counts no more where it still lies about.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from operator import attrgetter
from typing import Any, NamedTuple

from lorikeet.errors import StoreError
from lorikeet.usage.ledger import UsageAccount, UsageByAccount, UsageCounts

PREFIX = "usage/"
SCHEMA = 1

_NUMBERS = tuple(each.name for each in fields(UsageCounts))
_COLUMNS = (*UsageAccount._fields, *_NUMBERS)
_numbers = attrgetter(*_NUMBERS)  # astuple copies deeply
_OBJECT = re.compile(r"usage/[0-9-]{10}/[0-9]{6}-([0-9a-f]{16})-([0-9]{6,})\.json")
_COMPACTED = re.compile(r"usage/[0-9-]{10}/compacted-([0-9]{6,})\.json")


class UsageObjectId(NamedTuple):
    """The object with this number, from 0, of those that a process wrote for a day."""

    writer: str
    number: int


Marks = Mapping[str, int]
"""The number of each writer's last object."""


@dataclass(frozen=True, slots=True)
class UsageContent:
    """What an object holds. marks: a compacted object's."""

    use: UsageByAccount
    marks: Marks = field(default_factory=dict)


def day_prefix(day: date) -> str:
    """What the names of a day's objects begin with."""
    return f"{PREFIX}{day.isoformat()}/"


def object_key(day: date, written: UsageObjectId, made: float) -> str:
    """The key of an object that was made at this time, Unix seconds.

    A day may be over when an object of it is made, which then comes last.
    """
    return f"{object_prefix(day, made)}{written.writer}-{written.number:06d}.json"


def object_prefix(day: date, made: float) -> str:
    """What the names of objects begin with that were made at this second, Unix seconds."""
    at = datetime.fromtimestamp(made, UTC)
    clock = at.strftime("%H%M%S") if at.date() == day else "240000"
    return f"{day_prefix(day)}{clock}-"


def object_id(key: str) -> UsageObjectId | None:
    """The writer and number in an object's key; None if this is no usage object's."""
    match = _OBJECT.fullmatch(key)
    return UsageObjectId(match[1], int(match[2])) if match else None


def compacted_key(day: date, number: int) -> str:
    """The key of a day's compacted object. number: from 1; the highest holds all the others do."""
    return f"{day_prefix(day)}compacted-{number:06d}.json"


def compacted_number(key: str) -> int | None:
    """The number of a compacted object; None for other keys."""
    match = _COMPACTED.fullmatch(key)
    return int(match[1]) if match else None


def to_json(content: UsageContent) -> bytes:
    """The bytes of a usage object."""
    rows = [[*account, *_numbers(counts)] for account, counts in content.use.items()]
    return json.dumps(
        {"schema": SCHEMA, "columns": _COLUMNS, "rows": rows, "marks": dict(content.marks)},
        separators=(",", ":"),
    ).encode()


def from_json(data: bytes, key: str) -> UsageContent:
    """What to_json was given. Raises StoreError, with the remedy, for anything else."""
    try:
        raw = json.loads(data)
        if raw["schema"] > SCHEMA:
            raise StoreError(f"{key}: a newer release wrote this, upgrade this one")
        return UsageContent(dict(_rows(raw["columns"], raw["rows"])), raw["marks"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{key} is damaged ({error!r}): restore the object") from error


def _rows(columns: list[str], rows: list[list[Any]]) -> Iterable[tuple[UsageAccount, UsageCounts]]:
    for row in rows:
        values = dict(zip(columns, row, strict=True))
        account = UsageAccount(*(values.pop(name) for name in UsageAccount._fields))
        yield account, UsageCounts(**values)
