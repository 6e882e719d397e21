"""Status updates for gateways: where adapters are on a replica, and what its engine does."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from itertools import islice
from random import uniform

from lorikeet.protocol.status_update import StatusUpdate
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import EngineStatus

FEED_S = 60.0
"""About how long a subscription lasts: one that ends by itself never holds up a replica's end."""
HEARTBEAT_S = 1.0
"""How often a replica with nothing new sends an update: gateways must not take it for dead."""
_PART = 5000  # adapters in one update, some 350 KB


@dataclass(slots=True, eq=False)
class _Subscriber:
    """moved: what has moved since the last update. woken: whether there is anything new."""

    moved: dict[str, Residency] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class StatusFeed:
    """Passes on the engine's status to any number of subscribers. Lives on one event loop."""

    def __init__(self, status: EngineStatus) -> None:
        """status: the first, without its adapters' places, which come with `post`."""
        self._status = status
        self._held: dict[str, Residency] = {}
        self._subscribers: set[_Subscriber] = set()
        self._seq = 0

    def post(self, status: EngineStatus) -> None:
        """Take the engine's new status and wake all subscribers."""
        self._status = status
        for digest, tier in status.moved.items():
            if tier is Residency.REMOTE:
                self._held.pop(digest, None)
            else:
                self._held[digest] = tier
        for subscriber in self._subscribers:
            subscriber.moved.update(status.moved)
            subscriber.woken.set()

    def residency(self, digest: str) -> Residency:
        """Where the engine has an adapter, as it said last."""
        return self._held.get(digest, Residency.REMOTE)

    def update(self) -> StatusUpdate:
        """Return the live stats as they are, to go with an answer."""
        self._seq += 1
        return StatusUpdate(self._seq, self._status.live)

    def update_with_costs(self) -> StatusUpdate:
        """Return the live stats and the measured costs."""
        return replace(self.update(), costs=self._status.costs)

    async def subscribe(self, lasting_s: float = FEED_S) -> AsyncGenerator[StatusUpdate, None]:
        """Yield a snapshot of all that is held, then changes as they come, else heartbeats.

        A subscriber that takes updates slowly gets fewer and fuller ones.
        """
        subscriber = _Subscriber()
        self._subscribers.add(subscriber)
        loop = asyncio.get_running_loop()
        # not all at the same moment, though gateways may have begun so
        ends_s = loop.time() + lasting_s * uniform(0.8, 1.2)
        try:
            for part in self._snapshot():
                yield part
            while loop.time() < ends_s:
                await _wait(subscriber.woken, HEARTBEAT_S)
                subscriber.woken.clear()
                moved, subscriber.moved = subscriber.moved, {}
                yield replace(self.update(), moved=moved)
        finally:
            self._subscribers.remove(subscriber)

    def _snapshot(self) -> list[StatusUpdate]:
        """Return all that is held at this moment, in parts."""
        held = iter(self._held.items())
        parts = [dict(islice(held, _PART)) for _ in range(0, max(1, len(self._held)), _PART)]
        updates = [replace(self.update(), moved=part) for part in parts]
        updates[0] = replace(updates[0], begins_snapshot=True, costs=self._status.costs)
        updates[-1] = replace(updates[-1], ends_snapshot=True)
        return updates


async def _wait(event: asyncio.Event, within_s: float) -> None:
    """Wait for the event or for so long."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        pass
