"""Feed of a replica's status updates to gateways: adapters' tiers and the engine's load."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from itertools import islice
from random import uniform

from lorikeet.protocol.status_update import PrefixRoom, StatusUpdate
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import EngineStatus

FEED_S = 60.0
"""Approximate seconds that a gateway's subscription lasts before the gateway renews it.

A subscription that ends by itself never delays shutdown.
"""
_SNAPSHOT_PART = 5000  # adapters in one update, some 350 KB


@dataclass(slots=True, eq=False)
class _Subscriber:
    """Subscription of one gateway to a replica's status.

    moved: new tiers, by digest, of the adapters whose tier changed since this gateway's last
        update.
    woken: set when the status has changed.
    """

    moved: dict[str, Residency] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class StatusFeed:
    """Feed of the engine's status (load, costs, adapters' tiers) to any number of subscribers.

    For one event loop.
    """

    def __init__(
        self, status: EngineStatus, max_context: int | None = None, kv_tokens: int = 0
    ) -> None:
        """Begin with a first status of the engine.

        status: the first status. Its `moved` (adapters' new tiers) is ignored; `post` brings tiers.
        max_context: maximum number of tokens of prompt plus output that the engine takes.
        kv_tokens: number of tokens that the KV pages on the GPUs hold; 0: unknown.
        """
        self._status, self._max_context, self._kv_tokens = status, max_context, kv_tokens
        self._held: dict[str, Residency] = {}
        self._subscribers: set[_Subscriber] = set()
        self._seq = 0

    def post(self, status: EngineStatus) -> None:
        """Record a new status of the engine and wake all subscribers."""
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
        """Return an adapter's tier as the engine last reported it."""
        return self._held.get(digest, Residency.REMOTE)

    def update(self) -> StatusUpdate:
        """Return a status update with the engine's current live stats (its load) alone, for example
        for an answer's header.
        """
        self._seq += 1
        return StatusUpdate(self._seq, self._status.live)

    def update_with_costs(self) -> StatusUpdate:
        """Return a status update with the engine's current live stats, its measured costs, and the
        maximum number of tokens of prompt plus output.
        """
        return self._with_costs(self.update())

    async def subscribe(self, lasting_s: float = FEED_S) -> AsyncGenerator[StatusUpdate, None]:
        """Yield a snapshot of all adapters' tiers, then an update for each status of the engine,
        for `lasting_s`.

        An engine that works reports its status at least every half second, so updates show that
        replica and engine are alive. A slow subscriber gets fewer updates with more changes in
        each.
        """
        subscriber = _Subscriber()
        self._subscribers.add(subscriber)
        loop = asyncio.get_running_loop()
        # random, so that gateways that subscribed together do not renew together
        ends_s = loop.time() + lasting_s * uniform(0.8, 1.2)
        try:
            for part in self._snapshot():
                yield part
            while (left_s := ends_s - loop.time()) > 0 and await _comes(subscriber.woken, left_s):
                subscriber.woken.clear()
                moved, subscriber.moved = subscriber.moved, {}
                yield replace(self.update(), moved=moved)
        finally:
            self._subscribers.remove(subscriber)

    def _snapshot(self) -> list[StatusUpdate]:
        """Return updates that together name the current tiers of all adapters."""
        held = iter(self._held.items())
        parts = [
            dict(islice(held, _SNAPSHOT_PART))
            for _ in range(0, max(1, len(self._held)), _SNAPSHOT_PART)
        ]
        updates = [replace(self.update(), moved=part) for part in parts]
        updates[0] = replace(self._with_costs(updates[0]), begins_snapshot=True)
        updates[-1] = replace(updates[-1], ends_snapshot=True)
        return updates

    def _with_costs(self, update: StatusUpdate) -> StatusUpdate:
        return replace(
            update,
            costs=self._status.costs,
            max_context=self._max_context,
            prefix_room=self._prefix_room(),
        )

    def _prefix_room(self) -> PrefixRoom | None:
        live, border = self._status.live, self._status.border
        tokens, pages = self._kv_tokens, live.kv_pages_total
        if not tokens or not pages:
            return None
        if border is not None:  # kv_tokens counts lent pages, too
            tokens = tokens * border.kv_units // (border.kv_units + border.lent_units)
        host = self._status.host_pages
        if host is None:
            return PrefixRoom(tokens, 0, 0)
        on_host, token_bytes = host.pages * tokens // pages, host.page_bytes * pages // tokens
        return PrefixRoom(tokens, on_host, token_bytes)


async def _comes(event: asyncio.Event, within_s: float) -> bool:
    """Wait for an event; return False if it does not come in time."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False
