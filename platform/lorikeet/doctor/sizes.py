"""Sizes for people."""

_UNITS = {30: "GiB", 20: "MiB", 10: "KiB"}


def shown(count: int) -> str:
    """15.0 GiB, 80.5 MiB, 0.5 KiB."""
    power = next((power for power in _UNITS if count >> power), 10)
    return f"{count / 2**power:.1f} {_UNITS[power]}"
