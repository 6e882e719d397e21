"""Compact JSON for answers: ASCII, without spaces."""

import json

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # json.dumps would build one a call


def dump(value: object) -> bytes:
    """Return a value as JSON, in ASCII and without spaces."""
    return _ENCODER.encode(value).encode("ascii")
