"""A call as routing sees it."""

from collections.abc import Sequence

from lorikeet.api.messages import Call
from lorikeet.routing.ask import Ask
from lorikeet.routing.prefixes import prefix_chain


def ask_of(call: Call) -> Ask:
    """What it asks of a replica, and how its prompt begins.

    Of several prompts the first: they go to one replica together. Prompts of other tenants or with
    other adapters never share anything.
    """
    digest = call.adapter.digest if call.adapter else None
    chain = prefix_chain(_beginning(call), call.tenant, digest)
    return Ask(call.work, call.adapter, chain)


def _beginning(call: Call) -> str | Sequence[int]:
    if call.prompts:
        return call.prompts[0]
    return "\n".join(f"{message['role']}\n{message['content']}" for message in call.messages)
