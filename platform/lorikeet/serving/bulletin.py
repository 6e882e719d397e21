"""What a replica tells gateways: where adapters are here, and what its engine does."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from itertools import islice
from random import uniform

from lorikeet.routing.news import MeasuredCosts, ReplicaNews
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.news import EngineLoad, EngineNews

WATCH_S = 60.0
"""About how long a watch lasts: what ends by itself holds up no replica for ever."""
HEARTBEAT_S = 1.0
"""A replica with nothing new says so: gateways must not take it for dead."""
_PART = 5000  # adapters in one message, some 350 KB


@dataclass(slots=True, eq=False)
class _Listener:
    """What it has not been told yet. woken: whether there is anything."""

    moved: dict[str, Residency] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Bulletin:
    """Mirrors the engine's news for any number of watchers. Lives on one event loop."""

    def __init__(self, steps: StepCosts) -> None:
        self._costs = MeasuredCosts(steps)
        self._load = EngineLoad()
        self._held: dict[str, Residency] = {}
        self._listeners: set[_Listener] = set()
        self._seq = 0

    def post(self, news: EngineNews) -> None:
        """Take the engine's news and wake all who watch."""
        self._load = news.load
        self._costs = replace(self._costs, loads=news.loads)
        for digest, tier in news.moved.items():
            if tier is Residency.REMOTE:
                self._held.pop(digest, None)
            else:
                self._held[digest] = tier
        for listener in self._listeners:
            listener.moved.update(news.moved)
            listener.woken.set()

    def word(self) -> ReplicaNews:
        """The load as it is, to go with an answer."""
        self._seq += 1
        return ReplicaNews(self._seq, self._load)

    def word_with_costs(self) -> ReplicaNews:
        """The load, and what was measured here."""
        return replace(self.word(), costs=self._costs)

    async def watch(self, lasting_s: float = WATCH_S) -> AsyncGenerator[ReplicaNews, None]:
        """First all that is held, then what changes, as it does; a heartbeat when nothing does.

        Who takes messages slowly gets fewer and fuller ones.
        """
        listener = _Listener()
        self._listeners.add(listener)
        loop = asyncio.get_running_loop()
        # not all at the same moment, though gateways may have begun so
        ends_s = loop.time() + lasting_s * uniform(0.8, 1.2)
        try:
            for part in self._whole():
                yield part
            while loop.time() < ends_s:
                await _either(listener.woken, HEARTBEAT_S)
                listener.woken.clear()
                moved, listener.moved = listener.moved, {}
                yield replace(self.word(), moved=moved)
        finally:
            self._listeners.remove(listener)

    def _whole(self) -> list[ReplicaNews]:
        """All that is held at this moment, in parts."""
        held = iter(self._held.items())
        parts = [dict(islice(held, _PART)) for _ in range(0, max(1, len(self._held)), _PART)]
        news = [replace(self.word(), moved=part) for part in parts]
        news[0] = replace(news[0], begins_whole=True, costs=self._costs)
        news[-1] = replace(news[-1], ends_whole=True)
        return news


async def _either(event: asyncio.Event, within_s: float) -> None:
    """Wait for the event or for so long."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        pass
