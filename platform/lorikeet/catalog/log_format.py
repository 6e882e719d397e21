"""The JSON of one object of the log: an entry, and in `before` the entries that it repeats.

A reader that meets a schema or a change that it does not know stops: guessing would serve a wrong
state.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lorikeet.catalog.changes import SCHEMA, Entry
from lorikeet.errors import StoreError, StoreRefused

_ENTRIES = TypeAdapter(tuple[Entry, ...])


def object_to_json(entries: Sequence[Entry]) -> bytes:
    """The object of the last of these entries, which follow on each other."""
    *before, own = _ENTRIES.dump_python(tuple(entries), mode="json")
    return json.dumps({**own, "before": before}, ensure_ascii=False).encode()


def object_from_json(data: bytes, key: str) -> tuple[Entry, ...]:
    """The entries that an object holds, its own last; `key` names it in errors.

    Raises StoreError, with the remedy, for damage and for what a newer release wrote.
    """
    try:
        own = json.loads(data)
        raw = [*own.pop("before", ()), own]
        newest = max(entry["schema"] for entry in raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{key} is not a log entry ({error}): restore the object") from error
    if newest > SCHEMA:
        raise StoreRefused(
            f"{key} has schema {newest} and this process reads up to {SCHEMA}: "
            "a newer release writes this catalog, upgrade this one"
        )
    return _parsed(raw, key)


def _parsed(raw: list[Any], key: str) -> tuple[Entry, ...]:
    try:
        return _ENTRIES.validate_python(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "union_tag_invalid":
            raise StoreRefused(
                f"{key}: {problem['msg']}: a newer release writes this catalog, upgrade this one"
            ) from error
        raise StoreError(f"{key} is damaged ({problem['msg']}): restore the object") from error
