"""Format of usage objects: their keys and their content.

For each day a process writes objects numbered from 0, one after the other. An object's key holds
the process's id, and the object is written only if the key is absent, so that a repeated write
changes nothing. Keys order a day's objects by the time at which they were made; compacted objects
come last. A compacted object includes the previous one, and a mark for each writer: the number of
the writer's last included object. Objects up to a mark do not count again while they still exist.
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
SCHEMA = 2
"""Newest format version. Objects without costs and tokens of tier flex have version 1, which
earlier releases read.
"""

_NUMBERS = tuple(each.name for each in fields(UsageCounts))
_LATER = tuple(name for name in _NUMBERS if name == "cost" or name.startswith("flex_"))
_FIRST = tuple(name for name in _NUMBERS if name not in _LATER)
_later = attrgetter(*_LATER)
_OBJECT = re.compile(r"usage/[0-9-]{10}/[0-9]{6}-([0-9a-f]{16})-([0-9]{6,})\.json")
_COMPACTED = re.compile(r"usage/[0-9-]{10}/compacted-([0-9]{6,})\.json")


class UsageObjectId(NamedTuple):
    """Identity of one process's object for a day.

    writer: id of the process.
    number: position among the writer's objects of the day, from 0.
    """

    writer: str
    number: int


Marks = Mapping[str, int]
"""Number of the last counted object of each writer, by the writer's id."""


@dataclass(frozen=True, slots=True)
class UsageContent:
    """Content of a usage object: a part of one process's usage of a day, or, in a compacted
    object, the usage of many such objects.

    marks: in a compacted object, the last included object of each writer; else empty.
    """

    use: UsageByAccount
    marks: Marks = field(default_factory=dict)


def day_prefix(day: date) -> str:
    """Return the prefix of the keys of a day's objects."""
    return f"{PREFIX}{day.isoformat()}/"


def object_key(day: date, written: UsageObjectId, made: float) -> str:
    """Return the key of a usage object.

    written: process and number of the object.
    made: time at which the object was made, Unix seconds. Objects made after the end of `day` come
        last.
    """
    return f"{object_prefix(day, made)}{written.writer}-{written.number:06d}.json"


def object_prefix(day: date, made: float) -> str:
    """Return the prefix of the keys of objects made in the second `made`, Unix seconds."""
    at = datetime.fromtimestamp(made, UTC)
    clock = at.strftime("%H%M%S") if at.date() == day else "240000"
    return f"{day_prefix(day)}{clock}-"


def object_id(key: str) -> UsageObjectId | None:
    """Parse the key of a process's usage object; None for another key, as of a compacted object."""
    match = _OBJECT.fullmatch(key)
    return UsageObjectId(match[1], int(match[2])) if match else None


def compacted_key(day: date, number: int) -> str:
    """Return the key of a day's compacted object, which joins the usage of many objects.

    number: number of the object, from 1; each object includes the objects with lower numbers.
    """
    return f"{day_prefix(day)}compacted-{number:06d}.json"


def compacted_number(key: str) -> int | None:
    """Parse the number in a compacted object's key; None if the key is of another kind."""
    match = _COMPACTED.fullmatch(key)
    return int(match[1]) if match else None


def to_json(content: UsageContent) -> bytes:
    """Serialize the content of a usage object."""
    later = any(any(_later(counts)) for counts in content.use.values())
    names = _NUMBERS if later else _FIRST
    numbers = attrgetter(*names)  # astuple would copy deeply
    columns = (*UsageAccount._fields, *names)
    rows = [[*account, *numbers(counts)] for account, counts in content.use.items()]
    schema = SCHEMA if later else 1
    return json.dumps(
        {"schema": schema, "columns": columns, "rows": rows, "marks": dict(content.marks)},
        separators=(",", ":"),
    ).encode()


def from_json(data: bytes, key: str) -> UsageContent:
    """Parse the usage object stored under `key`.

    Raises StoreError if the object is damaged or was written by a newer release.
    """
    try:
        raw = json.loads(data)
        if raw["schema"] > SCHEMA:
            raise StoreError(f"{key}: a newer release wrote this object, upgrade this one")
        return UsageContent(dict(_rows(raw["columns"], raw["rows"])), raw["marks"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{key} is damaged ({error!r}): restore the object") from error


def _rows(columns: list[str], rows: list[list[Any]]) -> Iterable[tuple[UsageAccount, UsageCounts]]:
    for row in rows:
        values = dict(zip(columns, row, strict=True))
        account = UsageAccount(*(values.pop(name) for name in UsageAccount._fields))
        yield account, UsageCounts(**values)
