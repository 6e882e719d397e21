"""How likely the model thought tokens, in OpenAI's two shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST = -9999.0
"""What OpenAI says of a token that cannot be; JSON knows no infinity."""


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its log probability. bytes: None for a special one, which is no text."""

    name: str
    bytes: bytes | None
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an answer. offset: of its first character in the text. top: likeliest first."""

    token: LikelyToken
    top: tuple[LikelyToken, ...]
    offset: int


def chat_logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = [
        _token(drawn.token) | {"top_logprobs": [_token(token) for token in drawn.top]}
        for drawn in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    """`logprobs` of a completion's choice. The drawn token is always among the top ones."""
    return {
        "tokens": [drawn.token.name for drawn in tokens],
        "token_logprobs": [_finite(drawn.token.logprob) for drawn in tokens],
        "top_logprobs": [
            {token.name: _finite(token.logprob) for token in (*drawn.top, drawn.token)}
            for drawn in tokens
        ],
        "text_offset": [drawn.offset for drawn in tokens],
    }


def _token(token: LikelyToken) -> dict[str, Any]:
    known = None if token.bytes is None else list(token.bytes)
    return {"token": token.name, "logprob": _finite(token.logprob), "bytes": known}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
