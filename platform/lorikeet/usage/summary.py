"""Usage in rows, by what one wants to see it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import date
from enum import StrEnum
from typing import Any

from lorikeet.usage.counts import Account, Counts, Use, add_to

Key = tuple[str, ...]


class By(StrEnum):
    """What has a row of its own."""

    DAY = "day"
    TENANT = "tenant"
    ADAPTER = "adapter"


def rows(
    days: Mapping[date, Use], by: Iterable[By], tenant: str | None = None
) -> list[dict[str, Any]]:
    """Sums, in order, with the names of what they are of; tenant: only this one's.

    A row by adapter names its base model too; there adapter None is the base model alone.
    """
    wanted = list(dict.fromkeys(by))
    sums: dict[Key, Counts] = {}
    for day, use in days.items():
        for account, counts in use.items():
            if tenant in (None, account.tenant):
                add_to(sums, _key(day, account, wanted), counts)
    return [_named(key, wanted) | _counted(sums[key]) for key in sorted(sums)]


def _key(day: date, account: Account, by: list[By]) -> Key:
    parts = {
        By.DAY: (day.isoformat(),),
        By.TENANT: (account.tenant,),
        By.ADAPTER: (account.base_model, account.adapter or ""),
    }
    return tuple(name for each in by for name in parts[each])


def _named(key: Key, by: list[By]) -> dict[str, Any]:
    names = iter(key)
    named: dict[str, Any] = {}
    for each in by:
        if each is By.ADAPTER:
            named["base_model"] = next(names)
        named[each.value] = next(names) or None
    return named


def _counted(counts: Counts) -> dict[str, Any]:
    return {**asdict(counts), "slot_s": round(counts.slot_s, 3)}
