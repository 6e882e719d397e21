"""JSON as answers have it: in ASCII, without spaces."""

import json

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # which json.dumps would make for each value


def dump(value: object) -> bytes:
    """Return a value as JSON, in ASCII and without spaces."""
    return _ENCODER.encode(value).encode("ascii")
