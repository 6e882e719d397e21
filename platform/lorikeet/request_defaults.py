"""Defaults of requests that a version of an adapter sets in place of its base model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_TEMPLATE_BYTES = 64 << 10
"""Size limit in bytes of an adapter's own chat template."""
MAX_SYSTEM_PROMPT_BYTES = 32 << 10
"""Size limit in bytes of an adapter's system prompt."""
MAX_STOP_TOKENS = 16
"""Maximum number of an adapter's own stop tokens."""


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Defaults of requests for one version of an adapter.

    chat_template: template that writes prompts of chats; None: the base model's.
    system_prompt: text of the first message of chats without a system message; None: no text.
    stop: strings that end a choice, beside the request's.
    stop_token_ids: tokens that end a choice, beside the request's and the base model's.
    sampling: values of sampling fields that a request leaves out, by field; they precede the base
        model's.
    """

    chat_template: str | None = None
    system_prompt: str | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)
