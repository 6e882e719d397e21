"""Keys: what tenants and admins show."""

from typing import Annotated, Any

import typer

from lorikeet.cli.adapters import Tenant
from lorikeet.cli.names import parse_key_id, parse_tenant
from lorikeet.cli.output import AsJson, moment, print_json, print_line, print_table
from lorikeet.cli.server import admin

app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Keys: what tenants and admins show.

    Example: `lorikeet keys create --tenant acme`
    """


@app.command()
def create(
    ctx: typer.Context,
    tenant: Annotated[
        str | None,
        typer.Option(
            parser=parse_tenant,
            metavar="NAME",
            help="A key for this tenant's requests.",
            show_default=False,
        ),
    ] = None,
    for_admin: Annotated[
        bool, typer.Option("--admin", help="A key for administering, of no tenant.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key.

    It is shown this once: only its SHA-256 is kept.

    Example: `lorikeet keys create --tenant acme`
    """
    if (tenant is None) != for_admin:
        raise typer.BadParameter("want either --tenant NAME or --admin")
    if tenant is None:
        answer = admin(ctx).post("/keys", {"scopes": ["admin"]})
    else:
        answer = admin(ctx).post(f"/tenants/{tenant}/keys", {"scopes": ["infer"]})
    print_secret(answer, as_json)


@app.command("list")
def list_keys(
    ctx: typer.Context,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """List keys by their ids.

    The keys themselves are kept nowhere.

    Example: `lorikeet keys list --tenant acme`
    """
    path = "/keys" if tenant is None else f"/tenants/{tenant}/keys"
    answer = admin(ctx).get(path)
    if as_json:
        print_json(answer)
        return
    print_table(
        ["Id", "Tenant", "Scopes", "Since (UTC)", "State"],
        [_row(key) for key in answer["data"]],
        empty="No keys: `lorikeet keys create` makes one.",
    )


@app.command()
def revoke(
    ctx: typer.Context,
    key_id: Annotated[str, typer.Argument(parser=parse_key_id, metavar="ID", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Revoke a key, for ever.

    It stops working within seconds, on every gateway.

    Example: `lorikeet keys revoke key-3f1a97018cd4fa38`
    """
    answer = admin(ctx).delete(f"/keys/{key_id}")
    if as_json:
        print_json(answer)
        return
    print_line(f"Revoked [cyan]{key_id}[/cyan].")


def print_secret(key: dict[str, Any], as_json: bool) -> None:
    """A new key, shown once."""
    if as_json:
        print_json(key)
        return
    print_line(f"{key['key']}\n[dim]Key {key['id']}; it is not shown again.[/dim]")


def _row(key: dict[str, Any]) -> list[Any]:
    return [
        key["id"],
        key["tenant"],
        ", ".join(sorted(key["scopes"])),
        moment(key["created"]),
        "revoked" if key["revoked"] else "",
    ]
