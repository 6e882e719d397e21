"""OpenAI's fields that are not served, with the values of them that ask for nothing.

Clients send such defaults unasked. They are taken as absent; any other value is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Neutral = Mapping[str, Sequence[Any]]

CHAT: Neutral = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
COMPLETIONS: Neutral = {"suffix": ("",)}
MESSAGE: Neutral = {"tool_calls": ([],), "annotations": ([],)}
STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,)}


def is_neutral(value: object, neutral: Sequence[Any]) -> bool:
    """Whether the value is one of these; false is not 0, and 1 is not true."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )
