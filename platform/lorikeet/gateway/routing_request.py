"""A call as routing sees it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorikeet.protocol.messages import Call
from lorikeet.routing.prefix_index import prefix_hashes
from lorikeet.routing.ranking import RoutingRequest


def routing_request_of(call: Call) -> RoutingRequest:
    """What it asks of a replica, and how its prompt begins.

    Of several prompts the first: they go to one replica together. Prompts of other tenants or with
    other adapters never share anything.
    """
    digest = call.adapter.digest if call.adapter else None
    chain = prefix_hashes(_beginning(call), call.tenant, digest)
    return RoutingRequest(call.work, call.adapter, chain, call.tenant)


def _beginning(call: Call) -> str | Sequence[int]:
    if call.prompts:
        return call.prompts[0]
    turns = [_turn(message) for message in call.messages]
    if call.tools:
        turns.insert(0, json.dumps(call.tools.tools))  # templates write them first
    return "\n".join(turns)


def _turn(message: Mapping[str, Any]) -> str:
    text = f"{message['role']}\n{message['content']}"
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls)}" if calls else text
