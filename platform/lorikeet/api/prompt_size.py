"""How long a prompt is, as far as a gateway can say: it has no tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lorikeet.routing.prefixes import CHARACTERS_PER_TOKEN

_TEMPLATE_TOKENS = 5  # what chat templates put around each message, roughly


def prompt_tokens(prompt: str | Sequence[int]) -> int:
    """Of token ids exactly, of a text about."""
    if isinstance(prompt, str):
        return 1 + len(prompt) // CHARACTERS_PER_TOKEN
    return len(prompt)


def chat_tokens(messages: Iterable[Mapping[str, Any]]) -> int:
    """Of a conversation, about."""
    return sum(_TEMPLATE_TOKENS + prompt_tokens(message["content"]) for message in messages)
