"""Reader of server-sent events with types, as of the Messages and Responses APIs."""

import json
from typing import Any


def typed_events(raw: bytes) -> list[dict[str, Any]]:
    """Return each event's data; check that its event line names the same type."""
    *blocks, rest = raw.decode("ascii").split("\n\n")
    assert rest == ""
    read = []
    for block in blocks:
        name, data = block.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def kinds(read: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in read]
