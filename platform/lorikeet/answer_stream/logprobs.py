"""How likely the model thought tokens, in OpenAI's three shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST = -9999.0
"""OpenAI's number for a token that cannot be; JSON knows no infinity."""


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its log probability. bytes: None for a special one, which is no text.

    logprob: None for a prompt's first token, which follows nothing.
    """

    name: str
    bytes: bytes | None
    logprob: float | None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an answer. offset: its first character in the text. top: likeliest first."""

    token: LikelyToken
    top: tuple[LikelyToken, ...]
    offset: int


def chat_logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice."""
    content = [
        _token(sampled.token) | {"top_logprobs": [_token(token) for token in sampled.top]}
        for sampled in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice; the sampled token is always among the top."""
    return {
        "tokens": [sampled.token.name for sampled in tokens],
        "token_logprobs": [finite(sampled.token.logprob) for sampled in tokens],
        "top_logprobs": [
            None
            if sampled.token.logprob is None
            else {token.name: finite(token.logprob) for token in (*sampled.top, sampled.token)}
            for sampled in tokens
        ],
        "text_offset": [sampled.offset for sampled in tokens],
    }


def response_logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """Return the `logprobs` of a response's text, at "content"; there bytes are never null."""

    def named(token: LikelyToken) -> dict[str, Any]:
        return _token(token) | {"bytes": list(token.bytes or b"")}

    content = [
        named(sampled.token) | {"top_logprobs": [named(token) for token in sampled.top]}
        for sampled in tokens
    ]
    return {"content": content}


def _token(token: LikelyToken) -> dict[str, Any]:
    octets = None if token.bytes is None else list(token.bytes)
    return {"token": token.name, "logprob": finite(token.logprob), "bytes": octets}


def finite(logprob: float | None) -> float | None:
    """Return a log probability as JSON knows it; None stays None."""
    return None if logprob is None else max(logprob, _LEAST)
