"""How long an answer may be."""

from collections.abc import Sequence

from lorikeet.errors import ContextLengthExceeded
from lorikeet.protocol.messages import Call, Endpoint


def answer_room(call: Call, prompts: Sequence[Sequence[int]], engine_context: int) -> int:
    """Most tokens of a choice, at least 1: what is left behind the longest prompt.

    Raises ContextLengthExceeded where prompt and max_tokens are more than the caller's own limit.
    What the engine's context does not hold is the engine's to refuse.
    """
    longest = max(map(len, prompts))
    limit = call.max_context
    if limit is None:
        return max(1, engine_context - longest)
    if longest + (call.max_tokens or 1) > limit:
        if longest < limit:
            param = "max_tokens"
        else:
            param = "messages" if call.endpoint is Endpoint.CHAT else "prompt"
        raise ContextLengthExceeded(
            f"a prompt of {longest} tokens and an answer of up to {call.max_tokens or 1}: "
            f"{limit} together is the limit of this tenant or key",
            param=param,
        )
    return max(1, min(engine_context, limit) - longest)
