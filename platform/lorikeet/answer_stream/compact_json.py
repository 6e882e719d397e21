"""JSON as answers have it: in ASCII, without spaces."""

import json

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # which json.dumps would make for each value


def dump(value: object) -> bytes:
    """A value's JSON."""
    return _ENCODER.encode(value).encode("ascii")
