"""The commands `pin`, `unpin` and `pins`: keep adapters loaded."""

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet.catalog.rules.limits import HIGHEST_PRIORITY
from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import (
    AdapterName,
    Expires,
    parse_adapter,
    parse_bound,
    parse_count,
    parse_pin_target,
    parse_unpin_target,
)
from lorikeet.cli.output import AsJson, moment, print_answer, print_json, print_line, print_table
from lorikeet.errors import InvalidInput
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
    prompt: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            allow_dash=True,
            help="File with the system prompt of the adapter's chats, whose KV pages replicas then"
            " compute before users ask; - reads standard input. Without this option, the pin keeps"
            " the prompt that it has.",
        ),
    ] = None,
    draft: Annotated[
        bool | None,
        typer.Option(
            "--draft/--no-draft",
            help="Let the adapter, a draft LoRA of its base model, draft tokens of all answers on"
            " replicas with LORIKEET_SPECULATION=draft. Without this option, an adapter that drafts"
            " goes on.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be loaded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep adapters loaded, and load them now.

    While an alias shares its requests between two versions, both are kept.

    The file of `--prompt` must have the very text of the chats' system message, but for spaces and
    newlines at its end, which are left out.

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
            "prompt": None if prompt is None else _read(prompt),
            "draft": draft,
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
    prompt: Annotated[
        bool, typer.Option("--prompt", help="Remove only the pin's prompt, and keep the pin.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a pin: an adapter's, or a tenant's own.

    Adapters that it kept stay loaded until their memory is needed.

    Example: `lorikeet unpin acme/support`
    """
    if prompt:
        if pinned.name is None:
            raise typer.BadParameter(
                "--prompt: want TENANT/NAME, as only adapters' pins have prompts"
            )
        answer = admin(ctx).delete(f"/pins/{pinned.path}/prompt")
        said = f"Removed the prompt of [cyan]{pinned.path}[/cyan]; the adapter stays pinned."
        print_answer(answer, said, as_json)
        return
    answer = admin(ctx).delete(f"/pins/{pinned.path}")
    print_answer(answer, f"Unpinned [cyan]{pinned.path}[/cyan].", as_json)


def pins(
    ctx: typer.Context,
    prompt_of: Annotated[
        AdapterName | None,
        typer.Option(
            "--prompt",
            parser=parse_adapter,
            metavar="TENANT/NAME",
            help="Print only the prompt of this adapter's pin.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List pins, and why any of them is not met.

    Bytes: memory that a pin keeps on one replica. Prompt: number of replicas that have computed the
    pin's system prompt.

    Example: `lorikeet pins`
    """
    path = "/pins" if prompt_of is None else f"/pins/{prompt_of.path}/prompt"
    answer = admin(ctx).get(path)
    if as_json:
        print_json(answer)
        return
    if prompt_of is not None:
        typer.echo(answer["text"])
        return
    listed = answer["data"]
    has_prompts = any(pin.get("prompt") for pin in listed)  # 0.1.0 has none
    more = ["Prompt"] if has_prompts else []
    print_table(
        [
            "Pin",
            "Tier",
            "Replicas",
            "#Priority",
            "#Bytes",
            *more,
            "Expires (UTC)",
            "State",
            "Reason",
        ],
        [_row(pin, has_prompts=has_prompts) for pin in listed],
        empty="Nothing is pinned.",
    )
    _print_shortfalls([each for pin in listed for each in pin["shortfalls"]])
    failed = [pin for pin in listed if pin.get("prompt") and pin["prompt"]["failure"]]
    if failed:
        rows = [[_label(pin), pin["prompt"]["failure"]] for pin in failed]
        print_table(["Pin", "Prompt not computed"], rows, empty="")


def _print_pin(answer: dict[str, Any]) -> None:
    until = "" if answer["expires"] is None else f" until {moment(answer['expires'])} UTC"
    drafts = ", and drafts tokens of its base model" if answer.get("draft") else ""  # 0.1.0: none
    what = "Every adapter of " if answer["adapter"] is None else ""
    print_line(
        f"{what}[cyan]{_label(answer)}[/cyan] will be kept on {answer['tier']}"
        f" on {_replicas(answer)}{until}{drafts}; `lorikeet pins` shows when it is loaded."
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


def _read(file: Path) -> str:
    content = sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()
    try:
        return content.decode().rstrip()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is no text in UTF-8") from error


def _prompt(prompt: dict[str, Any] | None) -> str | None:
    if prompt is None:
        return None
    return f"{show_size(prompt['bytes'])} on {prompt['computed']} of {prompt['wanted']}"


def _row(pin: dict[str, Any], *, has_prompts: bool) -> list[Any]:
    return [
        _label(pin),
        pin["tier"] + ", drafts" * pin.get("draft", False),  # 0.1.0 has none
        "all" if pin["replicas"] is None else pin["replicas"],
        pin["priority"],
        show_size(pin["image_bytes"]),
        *([_prompt(pin.get("prompt"))] if has_prompts else []),
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
