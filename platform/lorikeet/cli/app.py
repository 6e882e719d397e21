"""The root command: its subcommands, server address, key, and exit statuses of failures."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer
from typer.core import TyperGroup

from lorikeet.cli.adapters.convert import convert
from lorikeet.cli.adapters.list_and_show import list_adapters, show
from lorikeet.cli.adapters.parity import parity
from lorikeet.cli.adapters.pins import pin, pins, unpin
from lorikeet.cli.adapters.promote import promote, rollback
from lorikeet.cli.adapters.register import register
from lorikeet.cli.adapters.retire import restore, retire
from lorikeet.cli.adapters.smoke import smoke
from lorikeet.cli.admin_client import DEFAULT_SERVER, AdminClient
from lorikeet.cli.catalog.gc import gc
from lorikeet.cli.catalog.init import init
from lorikeet.cli.catalog.log import log
from lorikeet.cli.catalog.snapshot import snapshot
from lorikeet.cli.output import print_error
from lorikeet.cli.planning import bench
from lorikeet.cli.planning.capacity import capacity
from lorikeet.cli.serve.command import ServeCommand, serve, stop
from lorikeet.cli.service.doctor import doctor
from lorikeet.cli.service.settings import settings
from lorikeet.cli.service.status import status
from lorikeet.cli.service.why import why
from lorikeet.cli.tenancy import keys, tenants
from lorikeet.cli.tenancy.usage import usage
from lorikeet.errors import Conflict, LorikeetError
from lorikeet_engine.errors import EngineError

EXIT_FAILED = 1
EXIT_CONFLICT = 3


class _Commands(TyperGroup):
    """Command group that turns errors of the platform and the engine into a line on stderr and an
    exit status.
    """

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
        str, typer.Option(envvar="LORIKEET_SERVER", help="The admin listener's address.")
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

    Exit status: 0 done, 1 failed, 2 wrong usage, 3 a conflict: someone else changed the object
    first, or the object's state forbids the change.

    Example: `lorikeet register ./my-adapter acme/support --promote`
    """
    ctx.obj = AdminClient(server, key)


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(show, promote, rollback, retire, convert, smoke, parity, pin, unpin, pins, status, why),
    *(usage, log, restore, init, snapshot, gc, capacity, doctor, settings, stop),
)
app.command(cls=ServeCommand)(serve)
app.command()(register)
app.command("list")(list_adapters)
for command in _COMMANDS:
    app.command()(command)
app.add_typer(bench.app, name="bench")
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")


def main() -> None:
    """Run the command line."""
    app(prog_name="lorikeet")
