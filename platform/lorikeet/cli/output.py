"""What the commands print: tables for people, JSON for programs, errors on stderr."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]

NOTHING = "–"
_SHORT = 16  # characters; a column of no more is never wrapped
_WORD = 32  # characters; one of no more, such as a key's id, is never cut in two


def print_json(value: object) -> None:
    """One JSON document on stdout, in which what does not print is escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    typer.echo(
        "".join(c if c.isprintable() or c == "\n" else json.dumps(c).strip('"') for c in text)
    )


def print_answer(answer: object, text: str, as_json: bool) -> None:
    """JSON for programs, else one sentence for people, which may hold Rich markup."""
    if as_json:
        print_json(answer)
    else:
        print_line(text)


def print_line(text: str) -> None:
    """One sentence on stdout; `text` may hold Rich markup."""
    _print(Console(highlight=False), text)


def print_error(message: str) -> None:
    """One sentence on stderr."""
    error = Text.assemble(("Error: ", "bold red"), _inert(message))
    _print(Console(stderr=True, highlight=False), error)


def print_warning(message: str) -> None:
    """One sentence on stderr, after which the command has still worked."""
    warning = Text.assemble(("Warning: ", "bold yellow"), _inert(message))
    _print(Console(stderr=True, highlight=False), warning)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str) -> None:
    """Rows under headers; `empty` instead of a table without rows.

    A column whose name starts with '#' holds numbers and stands to the right.
    """
    filled = [[NOTHING if cell is None else _inert(str(cell)) for cell in row] for row in rows]
    if not filled:
        print_line(empty)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    console, width = Console(highlight=False), 2 * len(columns)  # of what is between columns
    whole = width
    for index, name in enumerate(columns):
        cells = [name.removeprefix("#"), *(row[index] for row in filled)]
        longest = max(map(len, cells))
        words = (len(word) for cell in cells for word in cell.split())
        least = max([min(_SHORT, longest), *(word for word in words if word <= _WORD)])
        width += least
        whole += longest
        table.add_column(
            cells[0],
            justify="right" if name.startswith("#") else "left",
            no_wrap=longest <= _SHORT,
            min_width=least,
            overflow="fold",
            style="cyan" if index == 0 else "",
        )
    for row in filled:
        table.add_row(*map(Text, row))  # Text: a name is never markup
    # Too narrow a terminal wraps lines itself: a number that is cut would look like another.
    # What is read by no person is not wrapped at all.
    wrapped = console.is_terminal or "COLUMNS" in os.environ
    console.width = max(console.width, width if wrapped else whole)
    console.print(table)


def moment(unix_s: float | None) -> str | None:
    """Unix seconds as UTC, to the minute."""
    if unix_s is None:
        return None
    try:
        return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # the calendar ends with the year 9999
        return f"{unix_s:.1e} s"


def percent(share: float) -> str:
    """0.125 as 12.5%."""
    return f"{100 * share:.4g}%"


@contextmanager
def spinner(text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show where a person watches what goes on, and for how long; yields what changes the text."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(text, total=None)
        yield lambda now: progress.update(task, description=now)


def _inert(text: str) -> str:
    """Text that cannot steer a terminal: what does not print is spelt out."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _print(console: Console, text: str | Text) -> None:
    """Wrapped between words for people; one line stays one line for programs."""
    console.print(text, soft_wrap=not console.is_terminal)
