"""Pins: promises that an adapter stays near the GPU."""

from enum import Enum
from typing import Annotated, Any

import typer

from lorikeet.cli.adapters import Adapter
from lorikeet.cli.names import Name, parse_count, parse_duration, parse_name
from lorikeet.cli.output import AsJson, moment, print_json, print_line, print_table
from lorikeet.cli.server import admin


class Tier(Enum):
    """How near the weights are kept."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


def pin(
    ctx: typer.Context,
    adapter: Annotated[
        Name,
        typer.Argument(
            parser=parse_name,
            metavar="TENANT/NAME[@VERSION|@ALIAS]",
            help="Without @, what the alias prod points at, now and later.",
            show_default=False,
        ),
    ],
    replicas: Annotated[str, typer.Option(metavar="N|all", help="On how many replicas.")] = "all",
    tier: Annotated[Tier, typer.Option(help="Keep it at least this near.")] = Tier.GPU,
    reason: Annotated[str, typer.Option(help="Why, for whoever reads `lorikeet pins`.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Until 90s, 15m, 2h or 7d from now.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep an adapter loaded, and load it now.

    Example: `lorikeet pin acme/support --replicas 2 --reason "launch day" --expires 2h`
    """
    answer = admin(ctx).put(
        f"/pins/{adapter.path}",
        {
            "selector": adapter.selector or "prod",
            "replicas": parse_count(replicas, "all"),
            "tier": tier.value,
            "reason": reason,
            "expires_s": None if expires is None else parse_duration(expires),
        },
    )
    if as_json:
        print_json(answer)
    else:
        _print_pin(answer)


def unpin(ctx: typer.Context, adapter: Adapter, as_json: AsJson = False) -> None:
    """Take a pin back.

    The adapter stays where it is until its place is needed.

    Example: `lorikeet unpin acme/support`
    """
    answer = admin(ctx).delete(f"/pins/{adapter.path}")
    if as_json:
        print_json(answer)
        return
    print_line(f"Unpinned [cyan]{adapter.tenant}/{adapter.name}[/cyan].")


def pins(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List pins.

    Example: `lorikeet pins`
    """
    answer = admin(ctx).get("/pins")
    if as_json:
        print_json(answer)
        return
    print_table(
        ["Adapter", "Tier", "Replicas", "Expires (UTC)", "Reason"],
        [_row(pin) for pin in answer["data"]],
        empty="Nothing is pinned.",
    )


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (pin, unpin, pins):
        app.command()(command)


def _print_pin(answer: dict[str, Any]) -> None:
    until = "" if answer["expires"] is None else f" until {moment(answer['expires'])} UTC"
    print_line(
        f"[cyan]{answer['adapter']}@{answer['selector']}[/cyan] will be kept on {answer['tier']}"
        f" on {_replicas(answer)}{until}; `lorikeet status` shows when it is there."
    )


def _row(pin: dict[str, Any]) -> list[Any]:
    return [
        f"{pin['adapter']}@{pin['selector']}",
        pin["tier"],
        "all" if pin["replicas"] is None else pin["replicas"],
        moment(pin["expires"]) or "never",
        pin["reason"],
    ]


def _replicas(pin: dict[str, Any]) -> str:
    count = pin["replicas"]
    return "all replicas" if count is None else f"{count} replica{'s' * (count > 1)}"
