"""The commands `pin`, `unpin` and `pins`: keep adapters loaded."""

from enum import Enum
from typing import Annotated, Any

import typer

from lorikeet.catalog.rules.limits import HIGHEST_PRIORITY
from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import (
    AdapterName,
    Expires,
    parse_bound,
    parse_count,
    parse_pin_target,
    parse_unpin_target,
)
from lorikeet.cli.output import AsJson, moment, print_answer, print_json, print_line, print_table
from lorikeet.sizes import show_size


class Tier(Enum):
    """Lowest tier (place in memory or on disk) on which a pinned adapter is kept."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


PinTarget = Annotated[
    AdapterName,
    typer.Argument(
        parser=parse_pin_target,
        metavar="TENANT[/NAME[@VERSION|@ALIAS]]",
        help="Without @: the version that the alias prod points at, now and later. A tenant alone:"
        " that of all its adapters, now and later.",
        show_default=False,
    ),
]
Priority = Annotated[
    int,
    typer.Option(
        min=-HIGHEST_PRIORITY,
        max=HIGHEST_PRIORITY,
        help="If not all pins fit, higher priorities are kept first, then older pins.",
    ),
]


def pin(
    ctx: typer.Context,
    pinned: PinTarget,
    replicas: Annotated[str, typer.Option(metavar="N|all", help="Number of replicas.")] = "all",
    tier: Annotated[
        Tier, typer.Option(help="The lowest tier that adapters are kept on; gpu is the highest.")
    ] = Tier.GPU,
    priority: Priority = 0,
    reason: Annotated[str, typer.Option(help="The reason, shown by `lorikeet pins`.")] = "",
    expires: Expires = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be loaded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep adapters loaded, and load them now.

    While an alias shares its requests between two versions, both are kept.

    Example: `lorikeet pin acme/support --replicas 2 --reason "launch day" --expires 2h`
    """
    answer = admin(ctx).put(
        f"/pins/{pinned.path}",
        {
            "selector": pinned.selector or "prod",
            "replicas": parse_bound(parse_count, replicas, "all"),
            "tier": tier.value,
            "priority": priority,
            "reason": reason,
            "expires_s": expires,
            "dry_run": dry_run,
        },
    )
    if as_json:
        print_json(answer)
    elif dry_run:
        _print_moves(answer)
    else:
        _print_pin(answer)


def unpin(
    ctx: typer.Context,
    pinned: Annotated[
        AdapterName,
        typer.Argument(parser=parse_unpin_target, metavar="TENANT[/NAME]", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Remove a pin: an adapter's, or a tenant's own.

    Adapters that it kept stay loaded until their memory is needed.

    Example: `lorikeet unpin acme/support`
    """
    answer = admin(ctx).delete(f"/pins/{pinned.path}")
    print_answer(answer, f"Unpinned [cyan]{pinned.path}[/cyan].", as_json)


def pins(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List pins, and why any of them is not met.

    Bytes: memory that a pin keeps on one replica.

    Example: `lorikeet pins`
    """
    answer = admin(ctx).get("/pins")
    if as_json:
        print_json(answer)
        return
    print_table(
        ["Pin", "Tier", "Replicas", "#Priority", "#Bytes", "Expires (UTC)", "State", "Reason"],
        [_row(pin) for pin in answer["data"]],
        empty="Nothing is pinned.",
    )
    _print_shortfalls([each for pin in answer["data"] for each in pin["shortfalls"]])


def _print_pin(answer: dict[str, Any]) -> None:
    until = "" if answer["expires"] is None else f" until {moment(answer['expires'])} UTC"
    what = "Every adapter of " if answer["adapter"] is None else ""
    print_line(
        f"{what}[cyan]{_label(answer)}[/cyan] will be kept on {answer['tier']}"
        f" on {_replicas(answer)}{until}; `lorikeet pins` shows when it is loaded."
    )


def _print_moves(moves: dict[str, Any]) -> None:
    loads = moves["loads"]
    total = show_size(sum(load["image_bytes"] for load in loads))
    images = "1 image" if len(loads) == 1 else f"{len(loads)} images"
    print_line(f"Would load {images}, {total}. Nothing was changed.")
    if loads:
        rows = [
            [one["replica"], _version(one), one["from"], one["to"], show_size(one["image_bytes"])]
            for one in loads
        ]
        print_table(["Replica", "Loads", "From", "To", "#Bytes"], rows, empty="")
    if moves["releases"]:
        rows = [[each["replica"], _version(each), each["tier"]] for each in moves["releases"]]
        print_table(["Replica", "Need not keep", "On"], rows, empty="")
    _print_shortfalls(moves["unmet"])
    if moves["lost"]:
        print_line("Other pins would no longer be met:")
        _print_shortfalls(moves["lost"])


def _print_shortfalls(shortfalls: list[dict[str, Any]]) -> None:
    if shortfalls:
        rows = [[each["pin"], _version(each), each["reason"]] for each in shortfalls]
        print_table(["Pin", "Not kept", "Why"], rows, empty="")


def _row(pin: dict[str, Any]) -> list[Any]:
    return [
        _label(pin),
        pin["tier"],
        "all" if pin["replicas"] is None else pin["replicas"],
        pin["priority"],
        show_size(pin["image_bytes"]),
        moment(pin["expires"]) or "never",
        pin["state"],
        pin["reason"],
    ]


def _label(pin: dict[str, Any]) -> str:
    return pin["tenant"] if pin["adapter"] is None else f"{pin['adapter']}@{pin['selector']}"


def _version(of: dict[str, Any]) -> str | None:
    return None if of["adapter"] is None else f"{of['adapter']}@{of['version']}"


def _replicas(pin: dict[str, Any]) -> str:
    count = pin["replicas"]
    return "all replicas" if count is None else f"{count} replica{'s' * (count > 1)}"
