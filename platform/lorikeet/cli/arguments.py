"""Parsers of command-line arguments: names, counts, sizes, durations, times.

Names are checked by the catalog's rules before they become part of a URL: a `..` in a path would
reach another route.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer

from lorikeet.catalog.names import check_alias, check_name, check_selector
from lorikeet.catalog.rules.limits import LONGEST_LIFE_S
from lorikeet.errors import InvalidInput
from lorikeet.sizes import parse_size

Query = dict[str, str | None]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A name as typed: tenant/name, tenant/name@selector, or for pins a tenant alone.

    name: the adapter; None: all adapters of the tenant.
    selector: a version's number or an alias; None: not given.
    """

    tenant: str
    name: str | None = None
    selector: str | None = None

    @property
    def path(self) -> str:
        """The name as part of a URL's path."""
        return self.tenant if self.name is None else f"{self.tenant}/{self.name}"


def parse_tenant(text: str) -> str:
    """Check a tenant's name. Raises typer.BadParameter."""
    return _checked(check_name, text, "tenant")


def parse_alias(text: str) -> str:
    """Check an alias. Raises typer.BadParameter."""
    return _checked(check_alias, text, "alias")


def parse_key_id(text: str) -> str:
    """Check a key's id. Raises typer.BadParameter."""
    return _checked(check_name, text, "id")


def parse_name(text: str) -> AdapterName:
    """Parse tenant/name[@selector]. Raises typer.BadParameter."""
    whole, at, selector = text.partition("@")
    tenant, _, name = whole.partition("/")
    if not (tenant and name and bool(at) == bool(selector)):
        raise typer.BadParameter(f"{text!r}: want tenant/name, such as acme/support")
    return AdapterName(
        parse_tenant(tenant),
        _checked(check_name, name, "name"),
        _checked(check_selector, selector, "after @") if at else None,
    )


def parse_pin_target(text: str) -> AdapterName:
    """Parse tenant, tenant/name or tenant/name@selector. Raises typer.BadParameter."""
    return parse_name(text) if "/" in text or "@" in text else AdapterName(parse_tenant(text))


def parse_unpin_target(text: str) -> AdapterName:
    """Parse tenant or tenant/name. Raises typer.BadParameter."""
    return parse_adapter(text) if "/" in text else parse_pin_target(text)


def parse_adapter(text: str) -> AdapterName:
    """Parse tenant/name, without a version or alias. Raises typer.BadParameter."""
    name = parse_name(text)
    if name.selector is not None:
        raise typer.BadParameter(f"{text!r}: want tenant/name without @{name.selector}")
    return name


def parse_version(name: AdapterName) -> int:
    """Return the selector as a version's number. Raises typer.BadParameter for an alias or none."""
    if name.selector is None or not name.selector.isdecimal():
        raise typer.BadParameter(f"want a version: {name.path}@3 (`lorikeet show` lists them)")
    return int(name.selector)


def parse_duration(text: str) -> int:
    """Parse 90s, 15m, 2h or 7d into seconds. Raises typer.BadParameter."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r}: want a duration such as 90s, 15m, 2h or 7d")
    seconds = int(match[1]) * _SECONDS[match[2]]
    if seconds > LONGEST_LIFE_S:
        raise typer.BadParameter(f"{text!r}: want at most {LONGEST_LIFE_S // _SECONDS['d']}d")
    return seconds


def parse_bytes(text: str) -> int:
    """Parse 4096, 512MiB or 2.5GB into bytes. Raises typer.BadParameter."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error


def parse_count(text: str) -> int:
    """Parse an integer ≥ 1. Raises typer.BadParameter."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise typer.BadParameter(f"{text!r}: want an integer ≥ 1")
    return int(text)


def parse_bound(parse: Callable[[str], int], text: str, unbounded: str) -> int | None:
    """Parse a bound; return None for the word that means "no bound".

    parse: parses a bound.
    unbounded: the word for "no bound", such as none.

    Raises typer.BadParameter.
    """
    if text == unbounded:
        return None
    try:
        return parse(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or {unbounded}") from error


def parse_share(text: str) -> float:
    """Parse 10% or 0.1, above 0 and below 1. Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise typer.BadParameter(f"{text!r}: want a share such as 10%, more than 0% and below 100%")
    return share


def parse_since(text: str) -> float:
    """Parse 2026-11-21, 2026-11-21T10:00 (UTC) or 2h (ago) into Unix seconds.

    Raises typer.BadParameter.
    """
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
    """Parse the number of a log entry, or a time such as 2026-11-21, 2026-11-21T10:00 (UTC) or 2h
    (ago), into a query of the admin API.

    Raises typer.BadParameter.
    """
    if text.isdecimal() and 1 <= int(text) <= 10**12:
        return {"as_of_seq": text}
    return {"as_of_time": str(parse_since(text))}


AsOf = Annotated[
    Query | None,
    typer.Option(
        parser=parse_as_of,
        metavar="ENTRY|TIME|AGO",
        help="Show the state after an entry of `lorikeet log`, at 2026-11-21T10:00 (UTC), or 2h "
        "ago.",
        show_default=False,
    ),
]

Adapter = Annotated[
    AdapterName, typer.Argument(parser=parse_adapter, metavar="TENANT/NAME", show_default=False)
]
AdapterVersion = Annotated[
    AdapterName,
    typer.Argument(parser=parse_name, metavar="TENANT/NAME@VERSION", show_default=False),
]
AdapterOrVersion = Annotated[
    AdapterName,
    typer.Argument(parser=parse_name, metavar="TENANT/NAME[@VERSION]", show_default=False),
]
Alias = Annotated[
    str,
    typer.Option(
        parser=parse_alias, metavar="ALIAS", help="The alias; tenant/name alone means prod."
    ),
]
Tenant = Annotated[
    str | None, typer.Option(parser=parse_tenant, metavar="NAME", help="Only this tenant's.")
]
Expires = Annotated[
    int | None,
    typer.Option(
        parser=parse_duration,
        metavar="DURATION",
        help="Lifetime, such as 15m, 2h or 90d. Default: for ever.",
    ),
]


def _checked(check: Callable[[str, str], str], text: str, param: str) -> str:
    try:
        return check(text, param)
    except InvalidInput as error:
        raise typer.BadParameter(error.message) from error
