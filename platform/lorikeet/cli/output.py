"""Output of the commands: tables for people, JSON for programs, errors on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TextIO

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]

NOTHING = "–"
_SHORT = 16  # characters; a column this narrow is never wrapped
_WORD = 32  # characters; a word this short, such as a key's id, is never split


def print_json(value: object) -> None:
    """Print a JSON document, with unprintable characters escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    typer.echo(
        "".join(c if c.isprintable() or c == "\n" else json.dumps(c).strip('"') for c in text)
    )


def print_answer(answer: object, text: str, as_json: bool) -> None:
    """Print the answer as JSON, or else `text`, which may hold Rich markup."""
    if as_json:
        print_json(answer)
    else:
        print_line(text)


def print_line(text: str) -> None:
    """Print one sentence, which may hold Rich markup."""
    _print(Console(highlight=False), text)


def print_error(message: str) -> None:
    """Print one sentence on stderr, as an error."""
    error = Text.assemble(("Error: ", "bold red"), _inert(message))
    _print(Console(stderr=True, highlight=False), error)


def print_warning(message: str) -> None:
    """Print one sentence on stderr, about a command that has succeeded."""
    warning = Text.assemble(("Warning: ", "bold yellow"), _inert(message))
    _print(Console(stderr=True, highlight=False), warning)


def say(text: str) -> None:
    """Print a text on stderr, unless stderr is closed."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str) -> None:
    """Print a table.

    columns: headers; a '#' in front marks a column of numbers, aligned to the right.
    rows: cells of each row.
    empty: sentence to print if there are no rows.
    """
    filled = [[NOTHING if cell is None else _inert(str(cell)) for cell in row] for row in rows]
    if not filled:
        print_line(empty)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    console, width = Console(highlight=False), 2 * len(columns)  # of the space between columns
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
    # A terminal that is too narrow wraps whole lines: a truncated number would be misread.
    # Output to a program is not wrapped.
    wrapped = console.is_terminal or "COLUMNS" in os.environ
    console.width = max(console.width, width if wrapped else whole)
    console.print(table)


def moment(unix_s: float | None) -> str | None:
    """Format Unix seconds as UTC, to the minute."""
    if unix_s is None:
        return None
    try:
        return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # the calendar ends with the year 9999
        return f"{unix_s:.1e} s"


def percent(share: float) -> str:
    """Format 0.125 as 12.5%."""
    return f"{100 * share:.4g}%"


def is_shown(stream: TextIO) -> bool:
    """Whether the stream is a terminal that this process writes to in the foreground."""
    if not stream.isatty():
        return False
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:  # another session's terminal, which has no background jobs of this one
        return True


@contextmanager
def spinner(text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a text with the elapsed time if stderr is a terminal; yield a function that changes the
    text.
    """
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    hidden = quiet or not is_shown(sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(text, total=None)
        yield lambda now: progress.update(task, description=now)


def _inert(text: str) -> str:
    """Escape unprintable characters, which could control a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _print(console: Console, text: str | Text) -> None:
    """Print text, wrapped between words on a terminal, and on one line for programs."""
    console.print(text, soft_wrap=not console.is_terminal)
