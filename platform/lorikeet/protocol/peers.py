"""The gateways of one service, asking each other."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from lorikeet.errors import Unavailable

Answerer = Callable[..., Awaitable[Any]]


class Poll(NamedTuple):
    """What gateways answered, and how many did not in time; None: nobody could be asked."""

    answers: Sequence[Any]
    silent: int | None


class Peers:
    """One gateway's end: what it can be asked, and how it asks the others.

    This one knows no others; `serving/peers.py` has one that does.
    """

    def __init__(self) -> None:
        self._answerers: dict[str, Answerer] = {}

    def answers(self, question: str, answerer: Answerer) -> None:
        """Let a gateway be asked this. Arguments and answer must be picklable."""
        self._answerers[question] = answerer

    async def answer(self, question: str, *arguments: Any) -> Any:
        """What this gateway says itself."""
        return await self._answerers[question](*arguments)

    async def ask(self, question: str, *arguments: Any) -> Poll:
        """Every gateway's answer, this one's first."""
        own = await self.answer(question, *arguments)
        try:
            others = await self.poll(question, *arguments)
        except Unavailable:
            return Poll([own], None)
        return Poll([own, *others.answers], others.silent)

    async def poll(self, question: str, *arguments: Any) -> Poll:  # noqa: ARG002
        """The other gateways' answers. Raises Unavailable when they cannot be asked now."""
        return Poll((), 0)
