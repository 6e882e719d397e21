"""What goes along with a call through a gateway: limits, the request log."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lorikeet.protocol.messages import StreamItem

Headers = Sequence[tuple[bytes, bytes]]


class RequestObserver(AbstractContextManager[Any], Protocol):
    """What goes along with a call: entered when it starts, left when it ends, however it ends.

    Entering may refuse the call with a LorikeetError. A call that was made to its end has shown a
    FinalUsage.
    """

    def on_item(self, item: StreamItem) -> None:
        """Each item that is not bytes, as it comes; a Refusal may be in mid stream."""
        ...

    def on_first_bytes(self) -> Headers:
        """The first bytes are there; what the observer adds to the answer's headers."""
        ...
