"""The commands `retire` and `restore`: stop serving adapters or versions, and undo that."""

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import AdapterOrVersion, parse_version
from lorikeet.cli.output import AsJson, print_answer


def retire(ctx: typer.Context, adapter: AdapterOrVersion, as_json: AsJson = False) -> None:
    """Stop serving one version, or the whole adapter.

    Example: `lorikeet retire acme/support@1`
    """
    version = None if adapter.selector is None else parse_version(adapter)
    answer = admin(ctx).post(f"/adapters/{adapter.path}/retire", {"version": version})
    which = "" if version is None else f"@{version}"
    print_answer(answer, f"Retired [cyan]{adapter.path}{which}[/cyan].", as_json)


def restore(ctx: typer.Context, adapter: AdapterOrVersion, as_json: AsJson = False) -> None:
    """Bring back one retired version, or a retired adapter.

    An adapter comes back with its versions, aliases and pin as they were.

    Example: `lorikeet restore acme/support`
    """
    version = None if adapter.selector is None else parse_version(adapter)
    answer = admin(ctx).post(f"/adapters/{adapter.path}/restore", {"version": version})
    which = "" if version is None else f"@{version}"
    aliases = ", ".join(f"{alias} is version {at}" for alias, at in answer["aliases"].items())
    print_answer(answer, f"Restored [cyan]{adapter.path}{which}[/cyan]; {aliases}.", as_json)
