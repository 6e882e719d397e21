"""How likely the model thought tokens, in OpenAI's three shapes.

An answer may name twenty tokens in each place, so the JSON of each token is made once and joined.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic_core import to_json

from lorikeet.answer_stream.compact_json import dump
from lorikeet.protocol.messages import Endpoint

_LEAST = -9999.0
"""OpenAI's number for a token that cannot be; JSON knows no infinity."""


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token as answers name it. octets: its bytes; None for a special one, which is no text.

    json, json_octets: of its name and of these.
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
    """A token of an answer, and behind it the most likely ones of its place, likeliest first.

    logprobs: theirs; (None,) for a prompt's first token, which follows nothing. offset: the token's
    first character in the text.
    """

    tokens: Sequence[NamedToken]
    logprobs: Sequence[float | None]
    offset: int


Fields = Mapping[str, bytes]
"""The lists that `logprobs` has, by name: their elements in JSON, without brackets."""


def chat_logprobs(tokens: Sequence[SampledToken]) -> Fields:
    """Return the `logprobs` of a chat's choice, but for `refusal`."""
    return {"content": b",".join([_of_chat(sampled) for sampled in tokens])}


def response_logprobs(tokens: Sequence[SampledToken]) -> Fields:
    """Return the `logprobs` of a response's text, at "content"; there bytes are never null."""
    return {"content": b",".join([_of_chat(sampled, b"[]") for sampled in tokens])}


def completion_logprobs(tokens: Sequence[SampledToken]) -> Fields:
    """Return the `logprobs` of a completion's choice; the sampled token is always among the top."""
    return {
        "tokens": b",".join([sampled.tokens[0].json for sampled in tokens]),
        "token_logprobs": b",".join(numbers([sampled.logprobs[0] for sampled in tokens])),
        "top_logprobs": b",".join(map(_of_completion, tokens)),
        "text_offset": b",".join([b"%d" % sampled.offset for sampled in tokens]),
    }


def numbers(logprobs: Sequence[float | None]) -> list[bytes]:
    """Return log probabilities in JSON."""
    finite = [each if each is None or each >= _LEAST else _LEAST for each in logprobs]
    return to_json(finite)[1:-1].split(b",") if finite else []  # json takes twenty times as long


def _of_chat(sampled: SampledToken, no_octets: bytes = b"null") -> bytes:
    shown = [
        b'{"token":%s,"logprob":%s,"bytes":%s'
        % (token.json, known, no_octets if token.octets is None else token.json_octets)
        for token, known in zip(sampled.tokens, numbers(sampled.logprobs), strict=True)
    ]
    alternatives = b"},".join(shown[1:]) + b"}" * (len(shown) > 1)
    return b'%s,"top_logprobs":[%s]}' % (shown[0], alternatives)


def _of_completion(sampled: SampledToken) -> bytes:
    if sampled.logprobs[0] is None:
        return b"null"
    named = [token.json for token in sampled.tokens], numbers(sampled.logprobs)
    (drawn, *top) = zip(*named, strict=True)
    return b"{%s}" % b",".join([b"%s:%s" % each for each in dict([*top, drawn]).items()])


_LOGPROBS = {
    Endpoint.CHAT: chat_logprobs,
    Endpoint.COMPLETIONS: completion_logprobs,
    Endpoint.RESPONSES: response_logprobs,
    Endpoint.MESSAGES: chat_logprobs,  # none are asked for
}


class LogprobsJson:
    """The logprobs of one choice, or of a delta of it.

    Encoding all of them at the end would hold up every stream of the replica: 15,000 tokens with 20
    alternatives each took 2 s.
    """

    def __init__(self, endpoint: Endpoint, tokens: Sequence[SampledToken] = ()) -> None:
        """tokens: the first ones."""
        self._shape = _LOGPROBS[endpoint]
        self._lists: dict[str, list[bytes]] = {name: [] for name in self._shape(())}
        self.add(tokens)

    def add(self, tokens: Sequence[SampledToken]) -> int:
        """Add the next tokens, which may be none; return how many bytes they take."""
        if not tokens:
            return 0
        shaped = self._shape(tokens)
        for name, parts in self._lists.items():
            parts.append(shaped[name])
        return sum(map(len, shaped.values()))

    def before(self, later: "LogprobsJson") -> "LogprobsJson":
        """Return these with those of later tokens behind them."""
        joined = copy(self)
        joined._lists = {name: parts + later._lists[name] for name, parts in self._lists.items()}
        return joined

    def json(self) -> bytes:
        """Return the choice's `logprobs`."""
        fields = [dump(name) + b":" + self.values(name) for name in self._lists]
        refusal = [b'"refusal":null'] if self._shape is chat_logprobs else []
        return b"{%s}" % b",".join(fields + refusal)

    def values(self, field: str) -> bytes:
        """Return one of the lists that `logprobs` has."""
        return b"[%s]" % b",".join(self._lists[field])
