"""Summary of usage in rows, grouped by day, month, tenant or adapter."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import date
from enum import StrEnum
from typing import Any

from lorikeet.prices import COST_UNITS
from lorikeet.usage.ledger import UsageByAccount, UsageCounts, add_to


class GroupBy(StrEnum):
    """Dimension by which usage can be grouped."""

    DAY = "day"
    MONTH = "month"
    TENANT = "tenant"
    ADAPTER = "adapter"


_NAMES = {
    GroupBy.DAY: ("day",),
    GroupBy.MONTH: ("month",),
    GroupBy.TENANT: ("tenant",),
    GroupBy.ADAPTER: ("base_model", "adapter"),
}


def rows(
    days: Mapping[date, UsageByAccount], by: Iterable[GroupBy], tenant: str | None = None
) -> list[dict[str, Any]]:
    """Sum usage into sorted rows, one for each combination of values of the dimensions `by`.

    Rows by adapter hold the base model too; adapter None is the base model alone.

    days: usage of each day.
    tenant: the only tenant to include; None: every tenant.
    """
    wanted = list(dict.fromkeys(by))
    names = [name for each in wanted for name in _NAMES[each]]
    sums: dict[tuple[str | None, ...], UsageCounts] = {}
    for day, use in days.items():
        for account, counts in use.items():
            if tenant in (None, account.tenant):
                at = day.isoformat()
                named = {"day": at, "month": at[: len("2026-11")], **account._asdict()}
                add_to(sums, tuple(named[name] for name in names), counts)
    ordered = sorted(sums, key=lambda key: [part or "" for part in key])
    return [dict(zip(names, key, strict=True)) | _counted(sums[key]) for key in ordered]


def _counted(counts: UsageCounts) -> dict[str, Any]:
    cost = counts.cost / COST_UNITS
    return {**asdict(counts), "slot_s": round(counts.slot_s, 3), "cost": cost}
