"""Holds a call to the limits of its tenant and its key while it runs."""

from types import TracebackType

from lorikeet.gateway.replica_response import Headers, RequestObserver
from lorikeet.protocol.messages import AnswerHeader, Call, FinalUsage, StreamItem
from lorikeet.tenancy import RateLimitHold

TYPICAL_ANSWER_TOKENS = 256
"""Tokens reserved for a choice that may fill the context."""


class RateLimitObserver(RequestObserver):
    """Reserves the tokens that a call may take, and settles what it took.

    A complete answer's FinalUsage says what it took. A call that failed before its first bytes took
    nothing. Of any other, whose client left or whose replica was lost in mid stream, that is not
    known: what was reserved counts.
    """

    def __init__(self, hold: RateLimitHold, call: Call, base_model: str) -> None:
        self._hold = hold
        self._base_model = base_model
        self._tokens = expected_tokens(call)
        self._answered = False

    def __enter__(self) -> None:
        """Reserve tokens. Raises RateLimited, Overloaded."""
        self._hold.take(self._tokens, self._base_model)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Give back tokens that were not taken."""
        if isinstance(error, Exception) and not self._answered:
            self._hold.settle(0)
        self._hold.release()

    def on_item(self, item: StreamItem) -> None:
        """Note the first token, and settle the final usage."""
        match item:
            case AnswerHeader() if not item.is_first:
                self._hold.first_token()
            case FinalUsage():
                self._hold.settle(item.prompt_tokens + item.completion_tokens)

    def on_first_bytes(self) -> Headers:
        """Return the limits' status as headers."""
        self._answered = True
        self._hold.first_token()
        return [
            (name.encode(), value.encode())
            for limit in self._hold.limit_statuses()
            for name, value in limit.headers().items()
        ]


def expected_tokens(call: Call) -> int:
    """Return the tokens that a call takes at most, or about, if it sets no limit."""
    answer = call.max_tokens or TYPICAL_ANSWER_TOKENS
    if call.max_context is not None:
        answer = min(answer, call.max_context)
    return call.work.prompt_tokens + call.work.sequences * answer
