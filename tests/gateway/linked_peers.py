"""Gateways of one process, which ask each other directly."""

from typing import Any

from lorikeet.protocol.peers import Peers, Poll


class LinkedPeers(Peers):
    """One gateway's end. silent: how many others do not answer. trouble: what asking raises."""

    def __init__(self, *others: Peers, silent: int = 0) -> None:
        super().__init__()
        self.others, self.silent = others, silent
        self.trouble: Exception | None = None

    async def poll(self, question: str, *arguments: Any) -> Poll:
        if self.trouble is not None:
            raise self.trouble
        answers = [await each.answer(question, *arguments) for each in self.others]
        return Poll(answers, self.silent)


def link(ends: list[LinkedPeers]) -> None:
    """Let each of these ask all others."""
    for end in ends:
        end.others = tuple(each for each in ends if each is not end)
