"""The log probabilities of a choice that is not streamed, encoded as they come."""

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
    """The logprobs of one choice that is not streamed, as JSON that grows with its tokens.

    Encoding all of them at the end would hold up every stream of the replica: 15,000 tokens with 20
    alternatives each take 2 s.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._shape = _LOGPROBS[endpoint]
        self._lists: dict[str, list[bytes]] = {
            field: [] for field, values in self._shape(()).items() if values is not None
        }

    def add(self, tokens: Sequence[SampledToken]) -> None:
        """Add the next tokens, which may be none."""
        if tokens:
            shaped = self._shape(tokens)
            for field, parts in self._lists.items():
                parts.append(dump(shaped[field])[1:-1])

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
