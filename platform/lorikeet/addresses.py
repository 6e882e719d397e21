"""Addresses in settings: catalog, listeners, trace collector, sources of imported adapters."""

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from lorikeet.errors import InvalidSetting

SERVES_PORT = 8000
"""Ray Serve's default port, for tenants."""
_LABEL = "[A-Za-z0-9-]{1,63}"  # one label of a host name


def parse_catalog(value: object) -> object:
    """Return a catalog's address if it is a folder, s3://bucket or s3://bucket/prefix.

    Raises ValueError for another URL.
    """
    if _is_url(value) and not re.fullmatch(r"s3://[^/]+(/.*)?", str(value)):
        raise ValueError("want a folder or s3://bucket/prefix")
    return value


def parse_folder(value: object) -> object:
    """Return a folder's path. Raises ValueError for a URL."""
    if _is_url(value):
        raise ValueError("want a folder of this machine")
    return value


def _is_url(value: object) -> bool:
    return re.match("[A-Za-z0-9+]{2,}:/", str(value).strip()) is not None


def parse_prefixes(value: object) -> object:
    """Return the prefixes in a list such as `s3://bucket/prefix,s3://…`. Raises ValueError for
    another form.
    """
    if not isinstance(value, str):
        return value
    prefixes = tuple(item.strip().rstrip("/") for item in value.split(",") if item.strip())
    if not all(re.fullmatch(r"s3://[^/]+(/.+)?", prefix) for prefix in prefixes):
        raise ValueError("want s3://bucket/prefix, separated by commas")
    return prefixes


class Address(NamedTuple):
    """Address to listen at.

    host: name or IP address; IPv6 without brackets.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: object) -> object:
    """Return the Address of `host:port` or `[ipv6]:port`. Raises ValueError for another form."""
    if not isinstance(value, str):
        return value
    host = rf"\[([0-9A-Fa-f:.]+)\]|({_LABEL}(?:\.{_LABEL})*)"
    match = re.fullmatch(rf"(?:{host}):(\d+)", value.strip())
    if match is None or not 1 <= int(match[3]) <= 65_535:
        raise ValueError("want host:port such as 127.0.0.1:8001 or [::1]:8001")
    if match[1] is not None:
        ipaddress.IPv6Address(match[1])
    return Address(match[1] or match[2], int(match[3]))


def parse_collector(value: object) -> object:
    """Return the URL of a trace collector. Raises ValueError for another form."""
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", str(value)):
        raise ValueError("want an address such as http://collector:4318")
    return value


def public_port(environ: Mapping[str, str]) -> int:
    """Return the port for tenants: the value of PORT, or Serve's default. Raises InvalidSetting if
    PORT is no port.
    """
    text = environ.get("PORT") or str(SERVES_PORT)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**16):
        raise InvalidSetting(f"PORT={text!r}: want a port, an integer from 1 to 65535")
    return int(text)


def port_is_free(port: int) -> bool:
    """Whether no process listens on the port, at any address of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
