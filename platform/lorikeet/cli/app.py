"""The root command: where the server is, who is asking, and what a failure looks like."""

from importlib.metadata import version
from typing import Annotated

import typer
from typer.core import TyperGroup

from lorikeet.cli import (
    adapters,
    bench,
    capacity,
    catalog,
    convert,
    doctor,
    garbage,
    history,
    keys,
    pins,
    register,
    settings,
    smoke,
    status,
    tenants,
    usage,
    why,
)
from lorikeet.cli.output import print_error
from lorikeet.cli.server import DEFAULT_SERVER, AdminServer
from lorikeet.errors import Conflict, LorikeetError
from lorikeet_engine.errors import EngineError

EXIT_FAILED = 1
EXIT_CONFLICT = 3


class _Commands(TyperGroup):
    """Turns the two error trees into one sentence on stderr and an exit status."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # typer's own click
        try:
            return super().invoke(ctx)
        except (LorikeetError, EngineError) as error:
            print_error(error.message)
            conflict = isinstance(error, Conflict)
            raise typer.Exit(EXIT_CONFLICT if conflict else EXIT_FAILED) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorikeet {version('lorikeet-serve')}")
        raise typer.Exit


@app.callback()
def connect(
    ctx: typer.Context,
    server: Annotated[
        str, typer.Option(envvar="LORIKEET_SERVER", help="The admin door's address.")
    ] = DEFAULT_SERVER,
    key: Annotated[
        str | None,
        typer.Option(envvar="LORIKEET_ADMIN_KEY", help="An admin's key.", show_default=False),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Administer Lorikeet: adapters, pins, tenants and keys.

    Exit status: 0 done, 1 failed, 2 wrong usage, 3 a conflict: someone changed it first, or its
    state does not allow it.

    Example: `lorikeet register ./my-adapter acme/support --promote`
    """
    ctx.obj = AdminServer(server, key)


register.add_to(app)
adapters.add_to(app)
convert.add_to(app)
smoke.add_to(app)
pins.add_to(app)
status.add_to(app)
why.add_to(app)
usage.add_to(app)
history.add_to(app)
catalog.add_to(app)
garbage.add_to(app)
capacity.add_to(app)
doctor.add_to(app)
settings.add_to(app)
bench.add_to(app)
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")


def main() -> None:
    """The console script."""
    app(prog_name="lorikeet")
