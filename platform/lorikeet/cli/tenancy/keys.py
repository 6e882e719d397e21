"""Commands of `lorikeet keys`: manage the API keys of tenants and admins."""

import time
from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import Expires, Tenant, parse_duration, parse_key_id, parse_tenant
from lorikeet.cli.output import AsJson, moment, print_answer, print_json, print_line, print_table
from lorikeet.cli.tenancy.limit_options import KEY_LIMIT_OPTIONS, NONE, print_limits, takes_limits

KeyId = Annotated[str, typer.Argument(parser=parse_key_id, metavar="ID", show_default=False)]
ForTenant = Annotated[
    str | None,
    typer.Option(
        parser=parse_tenant,
        metavar="NAME",
        help="A key for requests of this tenant.",
        show_default=False,
    ),
]
Publish = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="May only push adapters with names like this, such as 'policy-*'. Can be repeated.",
        show_default=False,
    ),
]
Adapters = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,…",
        help="May only use these adapters, such as 'support,draft-*'; those of another tenant as "
        "'lab/tone'. No base models.",
        show_default=False,
    ),
]
Name = Annotated[
    str, typer.Option(help="A label, shown by `lorikeet keys list`.", show_default=False)
]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Keys: how tenants and admins authenticate.

    Example: `lorikeet keys create --tenant acme`
    """


@app.command()
@takes_limits(KEY_LIMIT_OPTIONS)
def create(
    ctx: typer.Context,
    limits: dict[str, Any],
    tenant: ForTenant = None,
    for_admin: Annotated[
        bool,
        typer.Option("--admin", help="A key for this command and the admin API; of no tenant."),
    ] = False,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="May only read: no changes, no generation."),
    ] = False,
    publish: Publish = None,
    adapters: Adapters = None,
    name: Name = "",
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Make a key.

    The key is shown once: only its SHA-256 is kept. Its limits apply in addition to its tenant's.

    Example: `lorikeet keys create --tenant acme --name ci --expires 90d --requests-per-min 60`
    """
    if (tenant is None) != for_admin:
        raise typer.BadParameter("want either --tenant NAME or --admin")
    if publish and (read_only or for_admin):
        raise typer.BadParameter("want --publish with --tenant, and without --read-only")
    if adapters is not None and (publish or for_admin):
        raise typer.BadParameter("want --adapters with --tenant, and without --publish")
    patterns = publish or (adapters.split(",") if adapters is not None else [])
    scope = "read-only" if read_only else "admin" if for_admin else "infer"
    answer = admin(ctx).post(
        "/keys" if tenant is None else f"/tenants/{tenant}/keys",
        {
            "scopes": ["publish" if publish else scope],
            **({"adapters": patterns} if patterns else {}),
            "name": name,
            "expires_s": expires,
            **limits,
        },
    )
    print_secret(answer, as_json)


@app.command("list")
def list_keys(ctx: typer.Context, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """List keys by their ids.

    The secret keys themselves are not kept and cannot be shown again.

    Example: `lorikeet keys list --tenant acme`
    """
    path = "/keys" if tenant is None else f"/tenants/{tenant}/keys"
    answer = admin(ctx).get(path)
    if as_json:
        print_json(answer)
        return
    print_table(
        ["Id", "Name", "Tenant", "Scopes", "Since (UTC)", "Expires (UTC)", "State"],
        [_row(key) for key in answer["data"]],
        empty="No keys: `lorikeet keys create` makes one.",
    )


@app.command()
@takes_limits(KEY_LIMIT_OPTIONS)
def limit(
    ctx: typer.Context, key_id: KeyId, limits: dict[str, Any], as_json: AsJson = False
) -> None:
    """Change a key's own limits; limits that are not named stay.

    A key's limits apply in addition to its tenant's.

    Example: `lorikeet keys limit key-3f1a97018cd4fa38 --tokens-per-min 50k --concurrent none`
    """
    if not limits:
        raise typer.BadParameter("want at least one limit, such as --requests-per-min 600")
    answer = admin(ctx).patch(f"/keys/{key_id}", limits)
    if as_json:
        print_json(answer)
        return
    print_line(f"Key [cyan]{key_id}[/cyan] now has, beside its tenant's limits:")
    print_limits(KEY_LIMIT_OPTIONS, answer)


@app.command()
def rotate(
    ctx: typer.Context,
    key_id: KeyId,
    overlap: Annotated[
        str,
        typer.Option(
            metavar="DURATION|none",
            help="How long the old key still works, such as 15m, 24h or 7d.",
        ),
    ] = "24h",
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one.

    The new key has the old key's tenant, scopes, limits, name and lifetime: a key of 90 days is
    replaced by another of 90 days. The new key is shown once.

    Example: `lorikeet keys rotate key-3f1a97018cd4fa38 --overlap 24h`
    """
    overlap_s = 0 if overlap == NONE else parse_duration(overlap)
    answer = admin(ctx).post(f"/keys/{key_id}/rotate", {"overlap_s": overlap_s})
    print_secret(answer, as_json)
    if not as_json:
        old = answer["replaces"]
        until = "no more" if old["revoked"] else f"until {moment(old['expires'])} UTC"
        print_line(f"[dim]{key_id}, which it replaces, works {until}.[/dim]")


@app.command()
def revoke(ctx: typer.Context, key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key permanently.

    It stops working within 5 seconds, on every gateway that reaches the catalog's store.

    Example: `lorikeet keys revoke key-3f1a97018cd4fa38`
    """
    answer = admin(ctx).delete(f"/keys/{key_id}")
    print_answer(answer, f"Revoked [cyan]{key_id}[/cyan].", as_json)


def print_secret(key: dict[str, Any], as_json: bool) -> None:
    """Print a new key and its id."""
    text = f"{key['key']}\n[dim]Key {key['id']}; it is not shown again.[/dim]"
    print_answer(key, text, as_json)


def _row(key: dict[str, Any]) -> list[Any]:
    return [
        key["id"],
        key["name"],
        key["tenant"],
        " ".join([*key["scopes"], *key["adapters"]]),
        moment(key["created"]),
        moment(key["expires"]),
        _state(key),
    ]


def _state(key: dict[str, Any]) -> str:
    if key["revoked"]:
        return "revoked"
    if key["expires"] is not None and key["expires"] <= time.time():
        return "expired"
    return "" if key["replaced_by"] is None else "replaced"
