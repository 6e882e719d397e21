"""The command usage: prints tokens, requests, GPU time and loads of tenants."""

import csv
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import Tenant
from lorikeet.cli.output import AsJson, print_json, print_line, print_table
from lorikeet.sizes import show_size
from lorikeet.usage.summary import GroupBy

_NUMBERS = {
    "requests": "#Requests",
    "prompt_tokens": "#Prompt",
    "cached_tokens": "#Cached",
    "output_tokens": "#Output",
    "slot_s": "#Slot s",
    "loads": "#Loads",
    "load_bytes": "#Loaded",
    "pushes": "#Pushes",
    "pushed_bytes": "#Pushed",
}
_NAMES = {
    "day": "Day",
    "month": "Month",
    "tenant": "Tenant",
    "base_model": "Base model",
    "adapter": "Adapter",
}


def _parse_day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: want a day such as 2026-11-21") from error


FirstDay = Annotated[
    str | None,
    typer.Option(
        "--from",
        parser=_parse_day,
        metavar="DAY",
        help="First day (UTC). Default: the first of this month.",
        show_default=False,
    ),
]
LastDay = Annotated[
    str | None,
    typer.Option(
        "--to",
        parser=_parse_day,
        metavar="DAY",
        help="Last day, included. Default: today.",
        show_default=False,
    ),
]
By = Annotated[
    list[GroupBy] | None,
    typer.Option(
        help="A row for each of these; can be repeated. Default: each adapter of each tenant.",
        show_default=False,
    ),
]


def usage(
    ctx: typer.Context,
    tenant: Tenant = None,
    first: FirstDay = None,
    last: LastDay = None,
    by: By = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, and nothing else.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show tenants' usage: tokens, their cost, requests, time on GPUs, loads.

    Flex: prompt and output tokens of batches and of service tier flex, which the other columns
    include. Replicas and gateways report every LORIKEET_USAGE_FLUSH_S seconds; newer usage is
    missing.

    Example: `lorikeet usage --tenant acme --from 2026-11-01 --by day --csv`
    """
    if as_csv and as_json:
        raise typer.BadParameter("want either --csv or --json")
    query = {
        "tenant": tenant,
        "from": first,
        "to": last,
        "by": ",".join(by) if by else None,
    }
    answer = admin(ctx).get("/usage", query)
    if as_json:
        print_json(answer)
    elif as_csv:
        _print_csv(answer["data"])
    else:
        print_line(f"From {answer['from']} to {answer['to']} (UTC)")
        _print_table(answer["data"])


def _print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [name for name in _NAMES if rows and name in rows[0]]
    priced, flex = any(row.get("cost") for row in rows), any(map(_flex_tokens, rows))
    more = [*(["#Cost"] if priced else []), *(["#Flex"] if flex else [])]
    print_table(
        [_NAMES[name] for name in names] + more + list(_NUMBERS.values()),
        [
            [
                *map(row.get, names),
                *([f"{row['cost']:.4f}"] if priced else []),
                *([_flex_tokens(row)] if flex else []),
                *_numbers(row),
            ]
            for row in rows
        ],
        empty="Nothing was used.",
    )


def _flex_tokens(row: Mapping[str, Any]) -> int:
    """Return the prompt and output tokens of batches and of tier flex; 0.1.0 tells none."""
    return int(row.get("flex_prompt_tokens", 0) + row.get("flex_output_tokens", 0))


def _numbers(row: Mapping[str, Any]) -> list[Any]:
    shown = {**row, "slot_s": f"{row['slot_s']:.1f}"}
    shown |= {name: show_size(row[name]) for name in ("load_bytes", "pushed_bytes")}
    return [shown[name] for name in _NUMBERS]
