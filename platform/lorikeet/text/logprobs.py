"""Formatting of tokens' log probabilities as JSON, in OpenAI's three shapes.

`lorikeet_engine.sampling` computes the log probabilities; this module writes the `logprobs` of chat
completions, completions and responses.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic_core import to_json

from lorikeet.protocol.messages import Endpoint
from lorikeet.text.compact_json import dump

_MIN_LOGPROB = -9999.0
"""OpenAI's number for an impossible token: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token's name and bytes in answers.

    octets: the token's bytes; None for a special token, which is no text.
    json, json_octets: JSON of `name` and of `octets`.
    """

    name: str
    octets: bytes | None
    json: bytes = field(init=False, repr=False, compare=False)
    json_octets: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        octets = None if self.octets is None else list(self.octets)
        object.__setattr__(self, "json", dump(self.name))
        object.__setattr__(self, "json_octets", dump(octets))


class SampledToken(NamedTuple):
    """A token and the likeliest tokens at its position, with their log probabilities.

    tokens: the sampled token, then the alternatives, likeliest first.
    logprobs: log probabilities of `tokens`; (None,) for a prompt's first token, which has none.
    offset: index in the text of the sampled token's first character.
    """

    tokens: Sequence[NamedToken]
    logprobs: Sequence[float | None]
    offset: int


Fields = Mapping[str, bytes]
"""Lists of a `logprobs` object by field name. Each list is given as JSON without its brackets."""


def chat_logprobs(tokens: Sequence[SampledToken]) -> Fields:
    """Return the `logprobs` of a chat completion's choice, without the field `refusal`."""
    return {"content": b",".join([_chat_entry(sampled) for sampled in tokens])}


def response_logprobs(tokens: Sequence[SampledToken]) -> Fields:
    """Return the `logprobs` of a text in the Responses API, under the field name "content".

    Unlike in chat completions, `bytes` is never null.
    """
    return {"content": b",".join([_chat_entry(sampled, b"[]") for sampled in tokens])}


def completion_logprobs(tokens: Sequence[SampledToken]) -> Fields:
    """Return the `logprobs` of a completion's choice; top_logprobs includes the sampled token."""
    return {
        "tokens": b",".join([sampled.tokens[0].json for sampled in tokens]),
        "token_logprobs": b",".join(json_numbers([sampled.logprobs[0] for sampled in tokens])),
        "top_logprobs": b",".join(map(_completion_entry, tokens)),
        "text_offset": b",".join([b"%d" % sampled.offset for sampled in tokens]),
    }


def json_numbers(logprobs: Sequence[float | None]) -> list[bytes]:
    """Return each log probability as JSON."""
    finite = [each if each is None or each >= _MIN_LOGPROB else _MIN_LOGPROB for each in logprobs]
    return to_json(finite)[1:-1].split(b",") if finite else []  # json: 20 times as long


def _chat_entry(sampled: SampledToken, no_octets: bytes = b"null") -> bytes:
    shown = [
        b'{"token":%s,"logprob":%s,"bytes":%s'
        % (token.json, known, no_octets if token.octets is None else token.json_octets)
        for token, known in zip(sampled.tokens, json_numbers(sampled.logprobs), strict=True)
    ]
    alternatives = b"},".join(shown[1:]) + b"}" * (len(shown) > 1)
    return b'%s,"top_logprobs":[%s]}' % (shown[0], alternatives)


def _completion_entry(sampled: SampledToken) -> bytes:
    if sampled.logprobs[0] is None:
        return b"null"
    named = [token.json for token in sampled.tokens], json_numbers(sampled.logprobs)
    (drawn, *top) = zip(*named, strict=True)
    return b"{%s}" % b",".join([b"%s:%s" % each for each in dict([*top, drawn]).items()])


_LOGPROBS = {
    Endpoint.CHAT: chat_logprobs,
    Endpoint.COMPLETIONS: completion_logprobs,
    Endpoint.RESPONSES: response_logprobs,
}


class LogprobsJson:
    """Growing JSON of the log probabilities of one choice, or of one delta.

    Each token is encoded when it comes. Encoding all tokens at the end would block the replica's
    event loop: 15,000 tokens with 20 alternatives each took 2 s.
    """

    def __init__(self, endpoint: Endpoint, tokens: Sequence[SampledToken] = ()) -> None:
        """Encode the first tokens.

        endpoint: called endpoint, which decides the shape of the JSON.
        tokens: the first tokens.
        """
        self._shape = _LOGPROBS.get(endpoint, chat_logprobs)  # other APIs have no logprobs
        self._lists: dict[str, list[bytes]] = {name: [] for name in self._shape(())}
        self.add(tokens)

    def add(self, tokens: Sequence[SampledToken]) -> int:
        """Encode the next tokens; return the number of bytes that they take in the JSON."""
        if not tokens:
            return 0
        shaped = self._shape(tokens)
        for name, parts in self._lists.items():
            parts.append(shaped[name])
        return sum(map(len, shaped.values()))

    def before(self, later: "LogprobsJson") -> "LogprobsJson":
        """Return the log probabilities of this object followed by those of `later`.

        Neither of the two is changed.
        """
        joined = copy(self)
        joined._lists = {name: parts + later._lists[name] for name, parts in self._lists.items()}
        return joined

    def json(self) -> bytes:
        """Return the whole `logprobs` object as JSON."""
        fields = [dump(name) + b":" + self.values(name) for name in self._lists]
        refusal = [b'"refusal":null'] if self._shape is chat_logprobs else []
        return b"{%s}" % b",".join(fields + refusal)

    def values(self, field: str) -> bytes:
        """Return one list of the `logprobs` object as JSON.

        field: name of the list.
        """
        return b"[%s]" % b",".join(self._lists[field])
