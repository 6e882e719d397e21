"""The gateways of one service, asking each other."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from lorikeet.errors import Unavailable

Handler = Callable[..., Awaitable[Any]]


class Poll(NamedTuple):
    """What gateways answered, and how many did not in time; None if no other could be asked."""

    answers: Sequence[Any]
    silent: int | None


class Peers:
    """One gateway's end: what it can be asked, and how it asks the others.

    This class knows no others; `serving/peers.py` has one that does.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def register(self, question: str, handler: Handler) -> None:
        """Let `handler` answer a question. Arguments and answer must be picklable."""
        self._handlers[question] = handler

    async def answer(self, question: str, *arguments: Any) -> Any:
        """Return what this gateway says itself."""
        return await self._handlers[question](*arguments)

    async def ask(self, question: str, *arguments: Any) -> Poll:
        """Return every gateway's answer, this one's first."""
        own = await self.answer(question, *arguments)
        try:
            others = await self.poll(question, *arguments)
        except Unavailable:
            return Poll([own], None)
        return Poll([own, *others.answers], others.silent)

    async def poll(self, question: str, *arguments: Any) -> Poll:  # noqa: ARG002
        """Return the other gateways' answers. Raises Unavailable when they cannot be asked now."""
        return Poll((), 0)
