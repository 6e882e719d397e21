"""Keeps a gateway's limits in step with the other gateways, and its budgets with what was used."""

import asyncio
import logging
import time
from typing import NoReturn

from lorikeet.api.peers import Peers
from lorikeet.errors import LorikeetError, Unavailable
from lorikeet.tenancy import Admission, Budget, Shares, Statement

log = logging.getLogger(__name__)

ROUND_S = 1.0
"""So often the gateways agree on their shares."""

_QUESTION = "shares"


class Reconciling:
    """Two loops beside the requests. Where one fails, what was known before holds."""

    def __init__(self, peers: Peers, shares: Shares, admission: Admission, budget: Budget) -> None:
        self._peers, self._shares = peers, shares
        self._admission, self._budget = admission, budget
        self._failure = ""
        self._silent = 0
        peers.answers(_QUESTION, self._answer)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._agree())
            tasks.create_task(self._read())

    async def _agree(self) -> NoReturn:
        while True:
            statement = self._shares.claim(time.monotonic())
            try:
                answers, silent = await self._peers.poll(_QUESTION, statement)
            except Unavailable:  # as while this application starts, and when it ends
                answers, silent = (), 1
            self._shares.agree(answers, complete=not silent, now=time.monotonic())
            self._admission.retune()
            if silent != self._silent:
                log.info("peers_silent", extra={"gateways": silent})
            self._silent = silent
            await asyncio.sleep(ROUND_S)

    async def _read(self) -> NoReturn:
        while True:
            began = time.time()
            if self._budget.due(began):
                await self._read_budget(began)
            await asyncio.sleep(ROUND_S)

    async def _read_budget(self, began: float) -> None:
        try:
            await asyncio.to_thread(self._budget.read)
        except LorikeetError as error:
            if error.message != self._failure:  # once, not every second of an outage
                log.warning("usage_unreadable", extra={"error": error.message})
            self._failure = error.message
        else:
            self._budget.was_read(began)
            self._failure = ""

    async def _answer(self, asked: Statement) -> Statement:
        return self._shares.answer(asked, time.monotonic())
