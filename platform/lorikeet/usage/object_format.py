"""The objects that hold usage: their names and what is in them.

A process writes one part after the other for each day: part n once part n − 1 is there, under a
name that holds the process's own id, and if absent, so that a repeated write changes nothing. In
the order of names come a day's parts by the time at which they were made, then the objects into
which parts were joined. A joined object holds all that is in the one before it, and for each writer
the number of the last part that it holds: what it holds counts no more where it still lies about.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from operator import attrgetter
from typing import Any, NamedTuple

from lorikeet.errors import StoreError
from lorikeet.usage.counts import UsageAccount, UsageByAccount, UsageCounts

PREFIX = "usage/"
SCHEMA = 1

_NUMBERS = tuple(each.name for each in fields(UsageCounts))
_COLUMNS = (*UsageAccount._fields, *_NUMBERS)
_numbers = attrgetter(*_NUMBERS)  # astuple copies deeply
_PART = re.compile(r"usage/[0-9-]{10}/[0-9]{6}-([0-9a-f]{16})-([0-9]{6,})\.json")
_JOINED = re.compile(r"usage/[0-9-]{10}/joined-([0-9]{6,})\.json")


class UsageObjectId(NamedTuple):
    """UsageObjectId `number`, from 0, of what a process wrote for a day."""

    writer: str
    number: int


Marks = Mapping[str, int]
"""For each writer the number of the last part."""


@dataclass(frozen=True, slots=True)
class UsageContent:
    """What an object says. marks: of one into which parts were joined."""

    use: UsageByAccount
    marks: Marks = field(default_factory=dict)


def day_prefix(day: date) -> str:
    """With which the names of a day's objects begin."""
    return f"{PREFIX}{day.isoformat()}/"


def part_key(day: date, part: UsageObjectId, made: float) -> str:
    """made: Unix seconds. A day may be over when a part of it is made: it then comes last."""
    return f"{parts_from(day, made)}{part.writer}-{part.number:06d}.json"


def parts_from(day: date, made: float) -> str:
    """With which the names of parts begin that were made at this second, Unix seconds."""
    at = datetime.fromtimestamp(made, UTC)
    clock = at.strftime("%H%M%S") if at.date() == day else "240000"
    return f"{day_prefix(day)}{clock}-"


def part_of(key: str) -> UsageObjectId | None:
    """Which part an object is, if it is one."""
    match = _PART.fullmatch(key)
    return UsageObjectId(match[1], int(match[2])) if match else None


def joined_key(day: date, number: int) -> str:
    """number: from 1; the highest one holds all that the others do."""
    return f"{day_prefix(day)}joined-{number:06d}.json"


def joined_number(key: str) -> int | None:
    """Which joined object it is, if it is one."""
    match = _JOINED.fullmatch(key)
    return int(match[1]) if match else None


def to_json(content: UsageContent) -> bytes:
    """The object."""
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
