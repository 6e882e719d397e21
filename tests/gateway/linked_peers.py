"""Peers of several gateways in one process, connected directly."""

from typing import Any

from lorikeet.protocol.peers import Peers, Poll


class LinkedPeers(Peers):
    """Peers of one gateway.

    others: peers of the gateways that answer its questions.
    silent: number of further gateways, which do not answer.
    trouble: error that asking raises; None: asking succeeds.
    """

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
    """Connect these gateways with each other."""
    for end in ends:
        end.others = tuple(each for each in ends if each is not end)
