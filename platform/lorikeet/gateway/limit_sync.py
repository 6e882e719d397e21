"""Keeps a gateway's limits in step with the other gateways, and its budgets with what was used."""

import asyncio
import logging
import time
from typing import NoReturn

from lorikeet.errors import Unavailable
from lorikeet.protocol.peers import Peers, Poll
from lorikeet.tenancy import Budget, RateLimiter, Shares, Statement

log = logging.getLogger(__name__)

ROUND_S = 1.0
"""So often the gateways agree on their shares."""

_QUESTION = "shares"


class LimitSync:
    """Two loops beside the requests. Where one fails, what was known before holds."""

    def __init__(
        self, peers: Peers, shares: Shares, admission: RateLimiter, budget: Budget
    ) -> None:
        self._peers, self._shares = peers, shares
        self._admission, self._budget = admission, budget
        self._noted: dict[str, str] = {}
        peers.answers(_QUESTION, self._answer)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._agree())
            tasks.create_task(self._read())

    async def _agree(self) -> NoReturn:
        while True:
            statement = self._shares.claim(time.monotonic())
            answers, silent = await self._ask(statement)
            self._shares.agree(answers, complete=not silent, now=time.monotonic())
            self._admission.retune()
            await asyncio.sleep(ROUND_S)

    async def _ask(self, statement: Statement) -> Poll:
        try:
            poll = await self._peers.poll(_QUESTION, statement)
        except Exception as error:  # whatever it is, the last shares hold
            # while the application starts or ends there is nobody to ask
            self._note("peers_unreachable", "" if isinstance(error, Unavailable) else repr(error))
            return Poll((), 1)
        self._note("peers_silent", str(poll.silent) if poll.silent else "")
        return poll

    async def _read(self) -> NoReturn:
        while True:
            began = time.time()
            if self._budget.due(began):
                try:
                    await asyncio.to_thread(self._budget.read)
                except Exception as error:  # what was read before holds
                    self._note("usage_unreadable", repr(error))
                else:
                    self._budget.was_read(began)
                    self._note("usage_unreadable", "")
            await asyncio.sleep(ROUND_S)

    def _note(self, event: str, trouble: str) -> None:
        """Log it once, not every second; "" is none."""
        if trouble and trouble != self._noted.get(event):
            log.warning(event, extra={"error": trouble})
        self._noted[event] = trouble

    async def _answer(self, asked: Statement) -> Statement:
        return self._shares.answer(asked, time.monotonic())
