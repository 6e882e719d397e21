"""The command log: prints changes of the catalog, with their times and authors."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import AdapterName, Tenant, parse_adapter, parse_since
from lorikeet.cli.output import AsJson, moment, print_json, print_line, print_table

_SHOWN_CHANGES = 3  # per entry
_SHOWN_DIGEST = 12  # characters


OfAdapter = Annotated[
    AdapterName | None,
    typer.Option(parser=parse_adapter, metavar="TENANT/NAME", help="About this adapter only."),
]
Since = Annotated[
    float | None,
    typer.Option(
        parser=parse_since, metavar="TIME|AGO", help="From 2026-11-21T10:00 (UTC) or 2h ago on."
    ),
]


def log(
    ctx: typer.Context,
    adapter: OfAdapter = None,
    tenant: Tenant = None,
    actor: Annotated[
        str | None, typer.Option(metavar="KEY-ID", help="By this key only.", show_default=False)
    ] = None,
    since: Since = None,
    before: Annotated[
        int | None, typer.Option(min=1, metavar="ENTRY", help="Older than this entry only.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most entries to show.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show changes of the catalog, with time and author, newest first.

    Example: `lorikeet log --adapter acme/support --since 2d`
    """
    if adapter is not None and tenant is not None:
        raise typer.BadParameter("want either --adapter or --tenant")
    query = {
        "tenant": tenant if adapter is None else adapter.tenant,
        "name": None if adapter is None else adapter.name,
        "actor": actor,
        "since": None if since is None else str(since),
        "before": None if before is None else str(before),
        "limit": str(limit),
    }
    answer = admin(ctx).get("/log", query)
    if as_json:
        print_json(answer)
        return
    print_table(
        ["Entry", "When (UTC)", "By", "What"],
        [_row(entry) for entry in answer["data"]],
        empty="No such entries.",
    )
    if answer["before"] is not None:
        print_line(f"[dim]Older entries: --before {answer['before']}[/dim]")


def _row(entry: Mapping[str, Any]) -> list[Any]:
    changes = [_format_change(change) for change in entry["changes"][:_SHOWN_CHANGES]]
    if more := len(entry["changes"]) - len(changes):
        changes.append(f"and {more} more")
    return [entry["seq"], moment(entry["time"]), entry["actor"], "; ".join(changes)]


def _format_change(change: Mapping[str, Any]) -> str:
    """Format a change, such as: alias moved acme/support alias=prod version=3."""
    whose = "/".join(change[key] for key in ("tenant", "name") if change.get(key))
    rest = {
        key: value
        for key, value in change.items()
        if key not in ("type", "tenant", "name", "options", "touches") and value not in (None, [])
    }
    rest |= change.get("options", {})
    if "defaults" in rest:
        rest["defaults"] = ",".join(rest["defaults"])
    if rest.get("expires") is not None:
        rest["expires"] = moment(rest["expires"])
    if "digest" in rest:
        rest["digest"] = rest["digest"][:_SHOWN_DIGEST]
    words = [change["type"].replace("_", " "), whose]
    fields = (f"{key}={'none' if value is None else value}" for key, value in rest.items())
    return " ".join(filter(None, [*words, *fields]))
