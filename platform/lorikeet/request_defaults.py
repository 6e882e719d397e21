"""Defaults of requests that a version of an adapter sets in place of its base model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_TEMPLATE_BYTES = 64 << 10
"""Size limit in bytes of an adapter's own chat template."""
MAX_SYSTEM_PROMPT_BYTES = 32 << 10
"""Size limit in bytes of an adapter's system prompt."""
MAX_STOP_TOKENS = 16
"""Maximum number of an adapter's own stop tokens."""
MAX_ADDED_TOKENS = 1024
"""Maximum number of tokens that an adapter adds to its base model's tokenizer."""
MAX_TOKEN_CHARACTERS = 256
"""Maximum length of such a token, in characters."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """Token that a tokenizer matches whole in a text, with the flags of Hugging Face's tokenizers.

    content: the token's text.
    special: answers leave the token's text out.
    single_word: match only between characters that are not of words.
    lstrip, rstrip: match white space before or behind the text, too.
    normalized: match the normalised text.
    """

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


@dataclass(frozen=True, slots=True)
class TokenizerChanges:
    """Differences of an adapter's tokenizer from its base model's.

    added: tokens that the base model's tokenizer lacks; their ids follow the base model's.
    special_tokens: texts of special tokens that chat templates write, by name, such as eos_token.
    """

    added: tuple[AddedToken, ...] = ()
    special_tokens: tuple[tuple[str, str], ...] = ()


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
    tokenizer: TokenizerChanges | None = None
