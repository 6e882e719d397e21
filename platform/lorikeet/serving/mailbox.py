"""What the engine made for the open requests of a replica and nobody has taken yet."""

import asyncio
import math
from collections.abc import Callable

from lorikeet.settings import Settings
from lorikeet_engine.request import Output, Tokens

PIECES_PER_S = 5_000
"""So many pieces of streams one gateway passes on in a second; what is in a piece hardly matters.

From `make bench-gateway`: a piece takes 0.18 ms of CPU from replica to client behind HAProxy, 0.33
behind Serve's own proxy.
"""


def pieces_per_s(settings: Settings) -> float:
    """A replica's share of what the gateways pass on."""
    return PIECES_PER_S * settings.gateways / settings.most_engines


class Mailbox:
    """Of one request. Lives on one event loop.

    Between the engine and a client nothing holds a piece back, so pieces that come too often for
    the gateways queue up where they cannot be joined. So they are joined here: `rest_s` says how
    long after a piece was taken the next one is ready. The first and the last never wait.
    """

    def __init__(self, rest_s: Callable[[], float]) -> None:
        self._outputs: list[Output] = []
        self._ready = asyncio.Event()
        self._rest_s = rest_s
        self._taken_s = -math.inf
        self._waking: asyncio.TimerHandle | None = None

    def put(self, output: Output) -> None:
        """Add an output, and wake the taker when it is time."""
        self._outputs.append(output)
        loop = asyncio.get_running_loop()
        due_s = self._taken_s + self._rest_s()
        if due_s <= loop.time() or _ends(output):
            self._ready.set()
        elif self._waking is None:
            self._waking = loop.call_at(due_s, self._ready.set)

    async def take(self) -> list[Output]:
        """Everything queued, at least one output."""
        await self._ready.wait()
        self._ready.clear()
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._taken_s = asyncio.get_running_loop().time()
        outputs, self._outputs = self._outputs, []
        return outputs


def _ends(output: Output) -> bool:
    """Whether it ends a choice, or all of them."""
    return not isinstance(output, Tokens) or output.finish is not None
