"""Commands of `lorikeet tenants`: manage tenants and their limits."""

from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import parse_tenant
from lorikeet.cli.output import AsJson, moment, print_answer, print_json, print_line, print_table
from lorikeet.cli.tenancy.limit_options import (
    TENANT_LIMIT_OPTIONS,
    amount,
    print_limits,
    takes_limits,
)
from lorikeet.sizes import show_size

Tenant = Annotated[str, typer.Argument(parser=parse_tenant, metavar="TENANT", show_default=False)]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def tenants() -> None:
    """Tenants: the owners of adapters and keys, and their limits.

    Example: `lorikeet tenants create acme`
    """


@app.command("list")
def list_tenants(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List tenants with their main limits; `show` has all limits of one.

    Example: `lorikeet tenants list`
    """
    answer = admin(ctx).get("/tenants")
    if as_json:
        print_json(answer)
        return
    print_table(
        [
            "Tenant",
            "#Requests/min",
            "#Tokens/min",
            "#In flight",
            "#Tokens/month",
            "#Weight",
            "Since (UTC)",
        ],
        [
            [
                tenant["tenant"],
                amount(tenant["requests_per_min"]),
                amount(tenant["tokens_per_min"]),
                amount(tenant["max_concurrent"]),
                amount(tenant["tokens_per_month"]),
                f"{tenant['weight']:g}",
                moment(tenant["created"]),
            ]
            for tenant in answer["data"]
        ],
        empty="No tenants yet: `lorikeet tenants create NAME` adds one.",
    )


@app.command()
def show(ctx: typer.Context, tenant: Tenant, as_json: AsJson = False) -> None:
    """Show a tenant's limits, and the number and size of its adapters.

    Example: `lorikeet tenants show acme`
    """
    answer = admin(ctx).get(f"/tenants/{tenant}")
    if as_json:
        print_json(answer)
        return
    print_limits(TENANT_LIMIT_OPTIONS, answer)
    adapters, taken = answer["adapters"], show_size(answer["total_bytes"])
    print_line(
        f"Adapters of [cyan]{tenant}[/cyan] in use: {adapters}, {taken} together."
        f" Created {moment(answer['created'])} UTC."
    )


@app.command()
@takes_limits(TENANT_LIMIT_OPTIONS)
def create(
    ctx: typer.Context, tenant: Tenant, limits: dict[str, Any], as_json: AsJson = False
) -> None:
    """Add a tenant, with limits or without.

    If it exists already, nothing is changed and the exit status is 3.

    Example: `lorikeet tenants create acme --requests-per-min 600 --concurrent 32`
    """
    answer = admin(ctx).post("/tenants", {"tenant": tenant, **limits})
    text = f"Created tenant [cyan]{tenant}[/cyan];"
    text += f" `lorikeet keys create --tenant {tenant}` makes its key."
    print_answer(answer, text, as_json)


@app.command()
@takes_limits(TENANT_LIMIT_OPTIONS)
def limit(
    ctx: typer.Context, tenant: Tenant, limits: dict[str, Any], as_json: AsJson = False
) -> None:
    """Change a tenant's limits; limits that are not named stay.

    Requests in flight finish. Adapters beyond a new limit stay, and so do pins, which are then
    shown as unmet.

    Example: `lorikeet tenants limit acme --tokens-per-min 1M --burst 30s --adapters none`
    """
    if not limits:
        raise typer.BadParameter("want at least one limit, such as --requests-per-min 600")
    answer = admin(ctx).patch(f"/tenants/{tenant}", limits)
    if as_json:
        print_json(answer)
        return
    print_line(f"Tenant [cyan]{tenant}[/cyan] now has:")
    print_limits(TENANT_LIMIT_OPTIONS, answer)
