"""Moments as they are typed on a command line: an entry of the log, a time, or how long ago."""

import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from lorikeet.cli.names import parse_duration

Query = dict[str, str | None]


def parse_since(text: str) -> float:
    """2026-11-21, 2026-11-21T10:00 (UTC) or 2h (ago) in Unix seconds. Raises typer.BadParameter."""
    if text[-1:] in ("s", "m", "h", "d") and text[:-1].isdecimal():
        return time.time() - parse_duration(text)
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"{text!r}: want a time such as 2026-11-21T10:00 (UTC), or 2h for 2 hours ago"
        ) from error


def parse_as_of(text: str) -> Query:
    """An entry's number, or a time as for parse_since, as a query. Raises typer.BadParameter."""
    if text.isdecimal() and 1 <= int(text) <= 10**12:
        return {"as_of_seq": text}
    return {"as_of_time": str(parse_since(text))}


AsOf = Annotated[
    Query | None,
    typer.Option(
        parser=parse_as_of,
        metavar="ENTRY|TIME|AGO",
        help="As it was after an entry of `lorikeet log`, at 2026-11-21T10:00 (UTC), or 2h ago.",
        show_default=False,
    ),
]
