"""The root command: its subcommands, server address, key, and exit statuses of failures."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from lorikeet.cli.admin_client import DEFAULT_SERVER, AdminClient
from lorikeet.cli.output import print_error
from lorikeet.errors import Conflict, LorikeetError
from lorikeet.interrupts import killed_by_sigint
from lorikeet_engine.errors import EngineError

_COMMANDS = {
    "serve": "serve.command:serve",
    "register": "adapters.register:register",
    "list": "adapters.list_and_show:list_adapters",
    "show": "adapters.list_and_show:show",
    "promote": "adapters.promote:promote",
    "rollback": "adapters.promote:rollback",
    "retire": "adapters.retire:retire",
    "convert": "adapters.convert:convert",
    "smoke": "adapters.smoke:smoke",
    "parity": "adapters.parity:parity",
    "pin": "adapters.pins:pin",
    "unpin": "adapters.pins:unpin",
    "pins": "adapters.pins:pins",
    "status": "service.status:status",
    "why": "service.why:why",
    "usage": "tenancy.usage:usage",
    "log": "catalog.log:log",
    "restore": "adapters.retire:restore",
    "init": "catalog.init:init",
    "snapshot": "catalog.snapshot:snapshot",
    "gc": "catalog.gc:gc",
    "capacity": "planning.capacity:capacity",
    "doctor": "service.doctor:doctor",
    "settings": "service.settings:settings",
    "stop": "serve.stop:stop",
    "bench": "planning.bench:app",
    "tenants": "tenancy.tenants:app",
    "keys": "tenancy.keys:app",
}
"""Module and name of each command's function, or of a group's Typer."""
_CLASSES = {"serve": "serve.command:ServeCommand"}
"""Module and name of the class of a command that has one of its own."""
EXIT_FAILED = 1
EXIT_CONFLICT = 3


class _ImportedOnDemand(Mapping[str, Any]):
    """Commands by name, each imported when it is first asked for: one command needs few of the
    modules that all need, which take a second to import.
    """

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            self._imported[name] = _import_command(name)
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


def _import_command(name: str) -> Any:
    """Return a command or a group of commands. Raises KeyError for an unknown name."""
    place = _COMMANDS[name]
    with killed_by_sigint():
        found = _import(place)
        cls = _import(_CLASSES[name]) if name in _CLASSES else None
    only = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    if isinstance(found, typer.Typer):
        only.add_typer(found, name=name)
        return get_command(only).commands[name]  # type: ignore[attr-defined]
    only.command(name, cls=cls)(found)
    return get_command(only)


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"lorikeet.cli.{module}"), name)


class _Commands(TyperGroup):
    """Command group that turns errors of the platform and the engine into a line on stderr and an
    exit status.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _ImportedOnDemand()  # type: ignore[assignment]  # nothing is added

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


def main() -> None:
    """Run the command line."""
    app(prog_name="lorikeet")
