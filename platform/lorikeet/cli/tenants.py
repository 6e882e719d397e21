"""Tenants: who is authenticated and limited."""

from typing import Annotated

import typer

from lorikeet.cli.names import parse_bytes, parse_count, parse_tenant
from lorikeet.cli.output import AsJson, moment, print_json, print_line, print_table, size
from lorikeet.cli.server import admin

Tenant = Annotated[str, typer.Argument(parser=parse_tenant, metavar="TENANT", show_default=False)]

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
        ["Tenant", "#Requests at once", "#Pin budget", "#Rank", "#Adapter", "Since (UTC)"],
        [
            [
                tenant["tenant"],
                tenant["max_concurrent"] or "no limit",
                size(tenant["pin_budget_bytes"]) or "no limit",
                tenant["max_rank"],
                size(tenant["max_adapter_bytes"]),
                moment(tenant["created"]),
            ]
            for tenant in answer["data"]
        ],
        empty="No tenants yet: `lorikeet tenants create NAME` adds one.",
    )


@app.command()
def create(
    ctx: typer.Context,
    tenant: Tenant,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests at once, over all gateways.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a tenant.

    One that is there stays as it is.

    Example: `lorikeet tenants create acme --max-concurrent 32`
    """
    body = {"tenant": tenant, "max_concurrent": max_concurrent}
    answer = admin(ctx).post("/tenants", body)
    if as_json:
        print_json(answer)
        return
    print_line(
        f"Tenant [cyan]{tenant}[/cyan] is there;"
        f" `lorikeet keys create --tenant {tenant}` makes its key."
    )


@app.command()
def limit(
    ctx: typer.Context,
    tenant: Tenant,
    max_concurrent: Annotated[
        str,
        typer.Argument(
            metavar="N|none", help="Requests at once, over all gateways.", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Change how many requests of a tenant may run at once.

    Those in flight finish.

    Example: `lorikeet tenants limit acme 32`
    """
    count = parse_count(max_concurrent, "none")
    answer = admin(ctx).patch(f"/tenants/{tenant}", {"max_concurrent": count})
    if as_json:
        print_json(answer)
        return
    bound = "no limit" if count is None else f"at most {count} requests at once"
    print_line(f"Tenant [cyan]{tenant}[/cyan] now has {bound}.")


@app.command("pin-budget")
def pin_budget(
    ctx: typer.Context,
    tenant: Tenant,
    budget: Annotated[
        str,
        typer.Argument(
            metavar="BYTES|none",
            help="Such as 512MiB or 2GiB: what all its pinned adapters may take on one replica.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Change how many bytes a tenant's pins may take.

    What is pinned beyond it stays pinned and is shown as unmet; pinning more is refused.

    Example: `lorikeet tenants pin-budget acme 2GiB`
    """
    count = parse_bytes(budget, "none")
    answer = admin(ctx).patch(f"/tenants/{tenant}", {"pin_budget_bytes": count})
    if as_json:
        print_json(answer)
        return
    bound = "any memory" if count is None else f"{size(count)} on each replica"
    print_line(f"The pins of [cyan]{tenant}[/cyan] may now take {bound}.")


@app.command("adapter-limits")
def adapter_limits(
    ctx: typer.Context,
    tenant: Tenant,
    max_rank: Annotated[
        str, typer.Argument(metavar="RANK|none", help="Of a new adapter.", show_default=False)
    ],
    max_bytes: Annotated[
        str,
        typer.Argument(
            metavar="BYTES|none", help="Of a new adapter, such as 512MiB.", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Change how large a tenant's new adapters may be.

    The service's own limits hold besides. What is registered already stays.

    Example: `lorikeet tenants adapter-limits acme 32 512MiB`
    """
    body = {
        "max_rank": parse_count(max_rank, "none"),
        "max_adapter_bytes": parse_bytes(max_bytes, "none"),
    }
    answer = admin(ctx).patch(f"/tenants/{tenant}", body)
    if as_json:
        print_json(answer)
        return
    rank = f"at most rank {max_rank}" if body["max_rank"] else "any rank served here"
    most = size(body["max_adapter_bytes"])
    print_line(
        f"New adapters of [cyan]{tenant}[/cyan] may have {rank}"
        f" and {f'at most {most}' if most else 'any size served here'}."
    )
