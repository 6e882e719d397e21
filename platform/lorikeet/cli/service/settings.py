"""The command settings: prints the value, default and meaning of every setting."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from lorikeet.cli.output import NOTHING, AsJson, print_json, print_line
from lorikeet.settings import PREFIX, Bytes, Memory, Settings
from lorikeet.sizes import write_size

_SIZES = {get_args(annotated)[1] for annotated in (Bytes, Memory)}
_PAGE = """\
# Settings
Every setting is an environment variable, read once when the service starts, and an option of \
`lorikeet serve`, which goes first: `LORIKEET_MAX_RANK` is `--max-rank`. Base models are its \
arguments, and an own model has one replica there. An unknown name or a wrong value stops the \
start, with an error that names the remedy. `lorikeet settings` shows the current values, and \
`lorikeet doctor` checks that the service can start with them \
([own-model.md](own-model.md#doctor)). Sizes are bytes, `512MiB`, `2.5GiB` or `80GB`, as in \
commands and files.

| variable | default | meaning |
|---|---|---|
{rows}

The `lorikeet` command reads `LORIKEET_SERVER`, the address of the admin listener \
(`http://127.0.0.1:8001`), and `LORIKEET_ADMIN_KEY`.

This page is what `lorikeet settings --markdown` prints.
"""


def settings(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/settings.md: defaults, without values.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every LORIKEET_ setting: its value in this environment, and its meaning.

    `lorikeet serve` and `serve run` would read the same values here.

    Example: `LORIKEET_REPLICAS=4 lorikeet settings`
    """
    if markdown:
        typer.echo(page(), nl=False)
        return
    parsed = Settings.from_env()
    rows = [
        {
            "variable": PREFIX + name.upper(),
            "value": as_written(field, getattr(parsed, name)),
            "default": as_written(field, field.default),
            "given": name in parsed.model_fields_set,
            "meaning": field.description,
        }
        for name, field in Settings.model_fields.items()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print_line(f"[cyan]{row['variable']}[/]{_shown(row)}\n  {escape(str(row['meaning']))}")


def page() -> str:
    """Return the text of docs/settings.md."""
    rows = (
        f"| `{PREFIX}{name.upper()}` | {_quoted(as_written(field, field.default))} "
        f"| {field.description} |"
        for name, field in Settings.model_fields.items()
    )
    return _PAGE.format(rows="\n".join(rows))


def as_written(field: FieldInfo, value: Any) -> str | None:
    """Format a value as in an environment variable; None: the setting is not set."""
    if value is None or value == () or value == {}:
        return None
    if isinstance(value, Mapping):
        return _by_name(value)
    if isinstance(value, float):
        return f"{value:.2%}".replace(".00", "") if _SIZES & set(field.metadata) else f"{value:g}"
    if isinstance(value, int) and _SIZES & set(field.metadata):
        return write_size(value)
    return ",".join(value) if type(value) is tuple else str(value)


def _by_name(value: Mapping[str, int | Path]) -> str:
    numbers = set(value.values())
    if len(numbers) == 1 and isinstance(number := numbers.pop(), int):
        return str(number)
    return ",".join(f"{name}={each}" for name, each in value.items())


def _shown(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return " is not set"
    default = f"   (default: {row['default'] or 'not set'})" if row["given"] else ""
    return escape(f"={row['value']}{default}")


def _quoted(text: str | None) -> str:
    return NOTHING if text is None else f"`{text}`"
