"""Parsing and formatting of sizes in bytes, such as 512MiB."""

import re
from decimal import Decimal

_PREFIXES = ("K", "M", "G", "T")
_BINARY = {"B": 1} | {f"{each}iB": 2 ** (10 * n) for n, each in enumerate(_PREFIXES, 1)}
_DECIMAL = {f"{each}B": 1000**n for n, each in enumerate(_PREFIXES, 1)}
_BYTES = {unit.upper(): size for unit, size in {"": 1, **_BINARY, **_DECIMAL}.items()}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)")


def parse_size(given: object) -> int:
    """Return the bytes of a size such as 4096, 512MiB, 2.5GB or 1 tib.

    Raises ValueError, with the expected form, for any other text and for less than 1 byte.
    """
    match = _SIZE.fullmatch(str(given).strip())
    if match is None or match[2].upper() not in _BYTES:
        raise ValueError("want a size such as 512MiB or 2GiB")
    size = int(Decimal(match[1]) * _BYTES[match[2].upper()])
    if size < 1:
        raise ValueError("want at least 1 byte")
    return size


def show_size(count: int | None) -> str | None:
    """Return a rounded size for display, such as 512 B or 13.1 MiB; None for None."""
    if count is None:
        return None
    unit = next((unit for unit in reversed(_BINARY) if count >= _BINARY[unit]), "B")
    return f"{count} B" if unit == "B" else f"{count / _BINARY[unit]:.1f} {unit}"


def write_size(count: int) -> str:
    """Return the exact size as `parse_size` reads it, in the largest binary unit: 512MiB."""
    unit = next(unit for unit in reversed(_BINARY) if not count % _BINARY[unit])
    return str(count) if unit == "B" else f"{count // _BINARY[unit]}{unit}"
