"""Names and durations as they are typed on a command line. The server judges them."""

import re
from dataclasses import dataclass
from urllib.parse import quote

import typer

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Name:
    """tenant/name, or tenant/name@selector with a version's number or an alias."""

    tenant: str
    name: str
    selector: str | None = None

    @property
    def path(self) -> str:
        """As a part of a URL's path."""
        return f"{segment(self.tenant)}/{segment(self.name)}"


def segment(name: str) -> str:
    """One name as one segment of a URL's path."""
    return quote(name, safe="")


def parse_name(text: str) -> Name:
    """tenant/name[@selector]. Raises typer.BadParameter."""
    whole, at, selector = text.partition("@")
    tenant, _, name = whole.partition("/")
    if not (tenant and name and bool(at) == bool(selector)):
        raise typer.BadParameter(f"{text!r}: want tenant/name, such as acme/support")
    return Name(tenant, name, selector or None)


def parse_adapter(text: str) -> Name:
    """tenant/name, where one version or alias would mean nothing. Raises typer.BadParameter."""
    name = parse_name(text)
    if name.selector is not None:
        raise typer.BadParameter(f"{text!r}: want tenant/name without @{name.selector}")
    return name


def parse_version(name: Name) -> int:
    """The selector, which must be a version's number. Raises typer.BadParameter."""
    if name.selector is None or not name.selector.isdecimal():
        raise typer.BadParameter(
            f"want a version: {name.tenant}/{name.name}@3 (`lorikeet show` lists them)"
        )
    return int(name.selector)


def parse_duration(text: str) -> int:
    """90s, 15m, 2h or 7d in seconds. Raises typer.BadParameter."""
    match = re.fullmatch(r"([1-9][0-9]*)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r}: want a duration such as 90s, 15m, 2h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
