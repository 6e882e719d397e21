"""The log probabilities of a choice, as JSON that grows with its tokens."""

from collections.abc import Sequence
from copy import copy

from lorikeet.answer_stream.compact_json import dump
from lorikeet.answer_stream.logprobs import (
    SampledToken,
    chat_logprobs,
    completion_logprobs,
    response_logprobs,
)
from lorikeet.protocol.messages import Endpoint

_LOGPROBS = {
    Endpoint.CHAT: chat_logprobs,
    Endpoint.COMPLETIONS: completion_logprobs,
    Endpoint.RESPONSES: response_logprobs,
    Endpoint.MESSAGES: chat_logprobs,  # none are asked for
}


class WholeLogprobs:
    """The logprobs of one choice, or of a delta of it.

    Encoding all of them at the end would hold up every stream of the replica: 15,000 tokens with 20
    alternatives each took 2 s.
    """

    def __init__(self, endpoint: Endpoint, tokens: Sequence[SampledToken] = ()) -> None:
        """tokens: the first ones."""
        self._shape = _LOGPROBS[endpoint]
        self._lists: dict[str, list[bytes]] = {field: [] for field in self._shape(())}
        self.add(tokens)

    def add(self, tokens: Sequence[SampledToken]) -> int:
        """Add the next tokens, which may be none; return how many bytes they take."""
        if not tokens:
            return 0
        shaped = self._shape(tokens)
        for field, parts in self._lists.items():
            parts.append(shaped[field])
        return sum(map(len, shaped.values()))

    def before(self, later: "WholeLogprobs") -> "WholeLogprobs":
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
