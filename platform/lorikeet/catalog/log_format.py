"""JSON format of a log object: an entry, with the earlier entries that it repeats in `before`."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lorikeet.catalog.changes import SCHEMA, Entry
from lorikeet.errors import StoreError, StoreRefused

_ENTRIES = TypeAdapter(tuple[Entry, ...])


def object_to_json(entries: Sequence[Entry]) -> bytes:
    """Serialize consecutive entries as the log object of the last one, which repeats the others."""
    *before, own = _ENTRIES.dump_python(tuple(entries), mode="json")
    return json.dumps({**own, "before": before}, ensure_ascii=False).encode()


def object_from_json(data: bytes, key: str) -> tuple[Entry, ...]:
    """Parse the entries in a log object; the last entry is the object's own.

    key: name of the object in error messages.

    Raises StoreError if the object is damaged, StoreRefused if a newer release wrote it.
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
