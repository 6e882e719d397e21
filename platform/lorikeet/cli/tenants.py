"""Tenants: who is authenticated and limited."""

from typing import Annotated

import typer

from lorikeet.cli.names import parse_tenant
from lorikeet.cli.output import AsJson, moment, print_json, print_line, print_table
from lorikeet.cli.server import admin

app = typer.Typer(no_args_is_help=True)


@app.callback()
def tenants() -> None:
    """Tenants: who is authenticated and limited.

    Example: `lorikeet tenants create acme`
    """


@app.command("list")
def list_tenants(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List tenants.

    Example: `lorikeet tenants list`
    """
    answer = admin(ctx).get("/tenants")
    if as_json:
        print_json(answer)
        return
    print_table(
        ["Tenant", "#Requests at once", "Since (UTC)"],
        [
            [tenant["tenant"], tenant["max_concurrent"] or "no limit", moment(tenant["created"])]
            for tenant in answer["data"]
        ],
        empty="No tenants yet: `lorikeet tenants create NAME` adds one.",
    )


@app.command()
def create(
    ctx: typer.Context,
    tenant: Annotated[
        str, typer.Argument(parser=parse_tenant, metavar="TENANT", show_default=False)
    ],
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests at once, over all gateways.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a tenant.

    Example: `lorikeet tenants create acme --max-concurrent 32`
    """
    answer = admin(ctx).put(f"/tenants/{tenant}", {"max_concurrent": max_concurrent})
    if as_json:
        print_json(answer)
        return
    print_line(
        f"Tenant [cyan]{tenant}[/cyan] is there;"
        f" `lorikeet keys create --tenant {tenant}` makes its key."
    )
