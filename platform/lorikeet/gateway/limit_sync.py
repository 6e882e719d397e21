"""Background loops for rate limits and budgets.

One loop agrees with the other gateways on this gateway's share of each rate limit. Another loop
reads recorded usage, which budgets limit.
"""

import asyncio
import logging
import time
from typing import NoReturn

from lorikeet.errors import Unavailable
from lorikeet.protocol.peers import Peers, Poll
from lorikeet.tenancy.limit_shares import GatewayClaims, LimitShares
from lorikeet.tenancy.rate_limiter import RateLimiter

log = logging.getLogger(__name__)

ROUND_S = 1.0
"""Seconds between two rounds in which gateways agree on their shares of the rate limits."""

_QUESTION = "shares"


class LimitSync:
    """Two background loops. One loop agrees with the other gateways on each gateway's share of the
    rate limits. The other loop reads the tenants' recorded usage, which is compared with their
    budgets.

    After a failure the last shares and the last usage stay in force.

    peers: means to ask the other gateways for their claims, and to answer them.
    shares: this gateway's share of each rate limit.
    """

    def __init__(self, peers: Peers, shares: LimitShares, rate_limiter: RateLimiter) -> None:
        self._peers, self._shares, self._rate_limiter = peers, shares, rate_limiter
        self._logged: dict[str, str | None] = {}
        peers.register(_QUESTION, self._answer)

    async def run(self) -> None:
        """Run both loops until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._agree_on_shares())
            tasks.create_task(self._read_usage())

    async def _agree_on_shares(self) -> NoReturn:
        while True:
            statement = self._shares.claim(time.monotonic())
            answers, silent = await self._ask(statement)
            self._shares.agree(answers, complete=not silent, now=time.monotonic())
            self._rate_limiter.apply_shares()
            await asyncio.sleep(ROUND_S)

    async def _ask(self, statement: GatewayClaims) -> Poll:
        try:
            poll = await self._peers.poll(_QUESTION, statement)
        except Exception as error:  # on any error the last shares stay in force
            # expected while the application starts or ends
            expected = isinstance(error, Unavailable)
            self._log_change("peers_unreachable", None if expected else repr(error))
            return Poll((), 1)
        self._log_change("peers_silent", str(poll.silent) if poll.silent else None)
        return poll

    async def _read_usage(self) -> NoReturn:
        budget = self._rate_limiter.budget
        while True:
            began = time.monotonic()
            if budget.due(began):
                try:
                    await asyncio.to_thread(budget.read)
                except Exception as error:  # the usage read before stays in force
                    self._log_change("usage_unreadable", repr(error))
                else:
                    budget.was_read(began)
                    self._log_change("usage_unreadable", None)
            await asyncio.sleep(ROUND_S)

    def _log_change(self, event: str, trouble: str | None) -> None:
        """Log a problem when it begins or changes, not each time it is found.

        event: name of the log record, and of the problem's kind.
        trouble: description of the problem; None: there is none now.
        """
        if trouble is not None and trouble != self._logged.get(event):
            log.warning(event, extra={"error": trouble})
        self._logged[event] = trouble

    async def _answer(self, asked: GatewayClaims) -> GatewayClaims:
        return self._shares.answer(asked, time.monotonic())
