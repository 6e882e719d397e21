"""Adapters: list, show, promote, rollback, retire."""

from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import (
    AdapterName,
    AsOf,
    parse_adapter,
    parse_alias,
    parse_name,
    parse_share,
    parse_tenant,
    parse_version,
)
from lorikeet.cli.output import AsJson, moment, print_answer, print_json, print_line, print_table
from lorikeet.sizes import show_size

Adapter = Annotated[
    AdapterName, typer.Argument(parser=parse_adapter, metavar="TENANT/NAME", show_default=False)
]
AdapterVersion = Annotated[
    AdapterName,
    typer.Argument(parser=parse_name, metavar="TENANT/NAME@VERSION", show_default=False),
]
AdapterPerhapsVersion = Annotated[
    AdapterName,
    typer.Argument(parser=parse_name, metavar="TENANT/NAME[@VERSION]", show_default=False),
]
Alias = Annotated[
    str,
    typer.Option(
        parser=parse_alias, metavar="ALIAS", help="Which alias; prod is what tenant/name means."
    ),
]
Tenant = Annotated[
    str | None, typer.Option(parser=parse_tenant, metavar="NAME", help="Of this tenant only.")
]


def list_adapters(
    ctx: typer.Context,
    tenant: Tenant = None,
    as_of: AsOf = None,
    as_json: AsJson = False,
) -> None:
    """List adapters.

    Example: `lorikeet list --tenant acme`
    """
    query = {"tenant": tenant, **(as_of or {})}
    page = admin(ctx).get("/adapters", query)
    adapters = page["data"]
    while page["next"] is not None:
        page = admin(ctx).get("/adapters", {**query, "after": page["next"]})
        adapters += page["data"]
    if as_json:
        print_json({"data": adapters})
        return
    print_table(
        ["Adapter", "Aliases", "#Versions", "#Rank", "#Blob", "#On GPU", "Base model", "State"],
        list(map(_summary, adapters)),
        empty="No adapters yet: `lorikeet register FOLDER tenant/name` adds one.",
    )


def show(ctx: typer.Context, adapter: Adapter, as_of: AsOf = None, as_json: AsJson = False) -> None:
    """Show one adapter and its versions.

    Example: `lorikeet show acme/support`
    """
    answer = admin(ctx).get(f"/adapters/{adapter.path}", as_of)
    if as_json:
        print_json(answer)
        return
    print_line(f"[bold]{answer['adapter']}[/bold]{_state(answer, ' · ')}")
    print_table(
        [
            "Version",
            "Aliases",
            "#Rank",
            "#Blob",
            "#On GPU",
            "Base model",
            "Registered (UTC)",
            "Digest",
        ],
        [_version_row(version) for version in reversed(answer["versions"])],
        empty="No versions.",
    )


def promote(
    ctx: typer.Context,
    adapter: AdapterVersion,
    alias: Alias = "prod",
    expect: Annotated[
        int | None,
        typer.Option(help="Only if the alias points to this version now; otherwise exit 3."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="10%",
            help="Give this part of the alias's sessions to the version, not all.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version, or give it a share of the alias's requests.

    New requests use it; those in flight finish on the old one. With a share, a session (the header
    x-lorikeet-session, or OpenAI's `user`) stays with its version; a promotion without a share
    ends it, and so does a rollback.

    Example: `lorikeet promote acme/support@3 --expect 2`
    """
    version = parse_version(adapter)
    body = {"version": version, "alias": alias, "expect": expect, "share": share}
    answer = admin(ctx).post(f"/adapters/{adapter.path}/promote", body)
    if share is None:
        _print_alias(adapter, alias, answer, as_json)
    else:
        label = f"[cyan]{adapter.path}@{alias}[/cyan]"
        text = f"{_percent(share)} of {label} now goes to version {version}."
        print_answer(answer, text, as_json)


def rollback(
    ctx: typer.Context, adapter: Adapter, alias: Alias = "prod", as_json: AsJson = False
) -> None:
    """Point an alias back at the version it had before.

    Example: `lorikeet rollback acme/support`
    """
    answer = admin(ctx).post(f"/adapters/{adapter.path}/rollback", {"alias": alias})
    _print_alias(adapter, alias, answer, as_json)


def retire(ctx: typer.Context, adapter: AdapterPerhapsVersion, as_json: AsJson = False) -> None:
    """Stop serving one version, or the whole adapter.

    Example: `lorikeet retire acme/support@1`
    """
    version = None if adapter.selector is None else parse_version(adapter)
    answer = admin(ctx).post(f"/adapters/{adapter.path}/retire", {"version": version})
    which = "" if version is None else f"@{version}"
    print_answer(answer, f"Retired [cyan]{adapter.path}{which}[/cyan].", as_json)


def _summary(adapter: dict[str, Any]) -> list[Any]:
    newest: dict[str, Any] = adapter["versions"][-1] if adapter["versions"] else {}
    return [
        adapter["adapter"],
        ", ".join(_alias(adapter, alias) for alias in sorted(adapter["aliases"])),
        len(adapter["versions"]),
        newest.get("max_rank"),
        show_size(newest.get("size_bytes")),
        show_size(newest.get("gpu_bytes")),
        newest.get("base_model"),
        _state(adapter),
    ]


def _alias(adapter: dict[str, Any], alias: str) -> str:
    """prod→3, or prod→3 (4: 10%)."""
    share = adapter["shares"].get(alias)
    second = f" ({share['version']}: {_percent(share['share'])})" if share else ""
    return f"{alias}→{adapter['aliases'][alias]}{second}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _state(adapter: dict[str, Any], before: str = "") -> str:
    words = [word for word in ("shared", "retired") if adapter[word]]
    return "".join(before + word for word in words) if before else ", ".join(words)


def _version_row(version: dict[str, Any]) -> list[Any]:
    aliases = ", ".join(version["aliases"])
    return [
        version["version"],
        "retired" if version["retired"] else aliases,
        version["max_rank"],
        show_size(version["size_bytes"]),
        show_size(version["gpu_bytes"]),
        version["base_model"],
        moment(version["created"]),
        version["digest"][:12],
    ]


def _print_alias(adapter: AdapterName, alias: str, answer: dict[str, Any], as_json: bool) -> None:
    text = f"[cyan]{adapter.path}@{alias}[/cyan] is now version {answer['version']}."
    print_answer(answer, text, as_json)
