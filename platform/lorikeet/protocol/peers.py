"""Questions among the gateways of one service."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from lorikeet.errors import Unavailable

Handler = Callable[..., Awaitable[Any]]


class Poll(NamedTuple):
    """Answers of several gateways to one question.

    silent: number of gateways that did not answer in time; None if no other gateway could be asked.
    """

    answers: Sequence[Any]
    silent: int | None


class Peers:
    """Means of one gateway to ask the other gateways questions, and to answer theirs.

    This class knows no other gateways; the subclass in `serving/peers.py` does.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def register(self, question: str, handler: Handler) -> None:
        """Register the function that answers a question on this gateway.

        question: name of the question.
        handler: called with the question's arguments. Arguments and answer must be picklable.
        """
        self._handlers[question] = handler

    async def answer(self, question: str, *arguments: Any) -> Any:
        """Return this gateway's own answer to a question."""
        return await self._handlers[question](*arguments)

    async def ask(self, question: str, *arguments: Any) -> Poll:
        """Return all gateways' answers to a question, this gateway's first."""
        own = await self.answer(question, *arguments)
        try:
            others = await self.poll(question, *arguments)
        except Unavailable:
            return Poll([own], None)
        return Poll([own, *others.answers], others.silent)

    async def poll(self, question: str, *arguments: Any) -> Poll:  # noqa: ARG002
        """Return the other gateways' answers to a question.

        Raises Unavailable if they cannot be asked.
        """
        return Poll((), 0)
