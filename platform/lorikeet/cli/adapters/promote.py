"""The commands `promote` and `rollback`: point aliases at versions."""

from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import (
    Adapter,
    AdapterName,
    AdapterVersion,
    Alias,
    parse_share,
    parse_version,
)
from lorikeet.cli.output import AsJson, percent, print_answer


def promote(
    ctx: typer.Context,
    adapter: AdapterVersion,
    alias: Alias = "prod",
    expect: Annotated[
        int | None,
        typer.Option(help="Only if the alias points to this version now; else exit with 3."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="10%",
            help="Give the version only this part of the alias's sessions.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version, or give the version a share of the alias's requests.

    New requests use the version; requests in flight finish on the old version. With --share, a
    session (the header x-session-id, or OpenAI's `user`) stays with its version. The next promotion
    without --share ends the share, and so does a rollback.

    Example: `lorikeet promote acme/support@3 --expect 2`
    """
    version = parse_version(adapter)
    body = {"version": version, "alias": alias, "expect": expect, "share": share}
    answer = admin(ctx).post(f"/adapters/{adapter.path}/promote", body)
    if share is None:
        _print_alias(adapter, alias, answer, as_json)
    else:
        label = f"[cyan]{adapter.path}@{alias}[/cyan]"
        text = f"{percent(share)} of {label} now goes to version {version}."
        print_answer(answer, text, as_json)


def rollback(
    ctx: typer.Context, adapter: Adapter, alias: Alias = "prod", as_json: AsJson = False
) -> None:
    """End an alias's traffic share if it has one, else point it back at its previous version.

    Example: `lorikeet rollback acme/support`
    """
    answer = admin(ctx).post(f"/adapters/{adapter.path}/rollback", {"alias": alias})
    _print_alias(adapter, alias, answer, as_json)


def _print_alias(adapter: AdapterName, alias: str, answer: dict[str, Any], as_json: bool) -> None:
    text = f"[cyan]{adapter.path}@{alias}[/cyan] is now version {answer['version']}."
    print_answer(answer, text, as_json)
