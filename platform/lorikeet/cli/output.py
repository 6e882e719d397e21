"""What the commands print: tables for people, JSON for programs, errors on stderr."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]

NOTHING = "–"


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(text: str) -> None:
    """One sentence on stdout; `text` may hold Rich markup."""
    Console(highlight=False).print(text, soft_wrap=True)


def print_error(message: str) -> None:
    """One sentence on stderr."""
    error = Text.assemble(("Error: ", "bold red"), message)
    Console(stderr=True, highlight=False).print(error, soft_wrap=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str, title: str | None = None
) -> None:
    """Rows under headers; numbers to the right; `empty` instead of a table without rows.

    A column whose name starts with '#' holds numbers.
    """
    filled = list(rows)
    if not filled:
        print_line(empty)
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        number = name.startswith("#")
        table.add_column(
            name.removeprefix("#"),
            justify="right" if number else "left",
            no_wrap=number or index == 0,
            overflow="fold",
            header_style="bold",
            style="cyan" if index == 0 else None,
        )
    for row in filled:
        table.add_row(*(Text(NOTHING if cell is None else str(cell)) for cell in row))
    Console(highlight=False).print(table)


def size(count: int | None) -> str | None:
    """Bytes for people: 512 B, 13.1 MiB."""
    if count is None:
        return None
    amount, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while amount >= 1024 and unit != "TiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def moment(unix_s: float | None) -> str | None:
    """Unix seconds as UTC, to the minute."""
    if unix_s is None:
        return None
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M")
