"""A call's place under the limits of its tenant and its key."""

from types import TracebackType

from lorikeet.api.errors import limit_headers
from lorikeet.api.generation import Companion, Headers
from lorikeet.api.messages import Call, Closing, Header, StreamItem
from lorikeet.tenancy import Visit

TYPICAL_ANSWER_TOKENS = 256
"""Reserved for a choice that may fill the context."""


class Place(Companion):
    """Reserves what a call may take while it runs, and settles what it took.

    A call that was made to its end says so. One that failed before its first bytes took nothing.
    Of any other, whose client left or whose replica was lost in mid stream, nobody here knows what
    it took: what was reserved counts.
    """

    def __init__(self, visit: Visit, call: Call, base_model: str) -> None:
        self._visit = visit
        self._base_model = base_model
        self._tokens = expected_tokens(call)
        self._begun = False

    def __enter__(self) -> None:
        """Take the place. Raises RateLimited, Overloaded."""
        self._visit.enter(self._tokens, self._base_model)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Give it back."""
        if isinstance(error, Exception) and not self._begun:
            self._visit.settle(0)
        self._visit.leave()

    def heard(self, item: StreamItem) -> None:
        """The replica says that the call has begun, or what it took."""
        match item:
            case Header() if item.load_s is not None:
                self._visit.begin()
            case Closing():
                self._visit.settle(item.prompt_tokens + item.completion_tokens)

    def headers(self) -> Headers:
        """How the limits stand."""
        self._begun = True
        self._visit.begin()
        headers = limit_headers(self._visit.standings())
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def expected_tokens(call: Call) -> int:
    """What a call takes at most, or where that is not said, about."""
    answer = call.max_tokens or TYPICAL_ANSWER_TOKENS
    if call.max_context is not None:
        answer = min(answer, call.max_context)
    return call.work.prompt_tokens + call.work.sequences * answer
