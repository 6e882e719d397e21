"""How long a prompt is, as far as a gateway can say: it has no tokenizer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lorikeet.routing.prefixes import CHARACTERS_PER_TOKEN

_TEMPLATE_TOKENS = 5  # what chat templates put around each message, roughly


def prompt_tokens(prompt: str | Sequence[int]) -> int:
    """Of token ids exactly, of a text about."""
    if isinstance(prompt, str):
        return 1 + len(prompt) // CHARACTERS_PER_TOKEN
    return len(prompt)


def chat_tokens(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> int:
    """Of a conversation, about."""
    size = prompt_tokens(json.dumps(tools)) if tools else 0
    for message in messages:
        size += _TEMPLATE_TOKENS + prompt_tokens(message["content"])
        if calls := message.get("tool_calls"):
            size += prompt_tokens(json.dumps(calls))
    return size
