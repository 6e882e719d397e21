"""The product's router and the simulator's baselines, as Serve's request routers."""

import math
import random
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lorikeet.serving.router import AdapterRouter

_MODELS = 45
"""As many adapters as a replica has room for, a tenth less: what Serve's users would set."""
_POINTS = 100
_FACTOR = 1.25


class Priced(AdapterRouter):
    """The product's, in a world where a second is worth less."""

    def initialize_state(self, **prices: Any) -> None:
        """prices: fields of Costs."""
        super().initialize_state()
        self._fleet._costs = replace(self._fleet._costs, **prices)


class PowerOfTwo(RequestRouter):
    """The less busy of two at random, as Serve's default router is where no model is named."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        """Serve takes the shorter queue of the two."""
        return [two_of(candidate_replicas)]


class Multiplexing(RequestRouter):
    """Serve's model multiplexing: where the model is; else where the fewest are.

    Keeps the books that Serve's replicas would: the last models used on each.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve once it is built."""
        self._models: dict[str, OrderedDict[str, None]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica."""
        model = pending_request.metadata.multiplexed_model_id if pending_request else ""
        books = {
            one: self._models.setdefault(one.replica_id.unique_id, OrderedDict())
            for one in candidate_replicas
        }
        free = [one for one, models in books.items() if model in models]
        if not free:
            fewest = min(len(models) for models in books.values())
            free = [one for one, models in books.items() if len(models) == fewest]
        chosen = min(two_of(free), key=self._queue)
        models = books[chosen]
        models[model] = None
        models.move_to_end(model)
        if len(models) > _MODELS:
            models.popitem(last=False)
        return [[chosen]]

    def _queue(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


class BoundedHashing(RequestRouter):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

    Around a ring from the adapter's point on, to the first replica with fewer requests than 1.25
    times the mean.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve once it is built."""
        self._ring: list[tuple[int, str]] = []
        self._on_ring: set[str] = set()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica."""
        named = {one.replica_id.unique_id: one for one in candidate_replicas}
        if self._on_ring != named.keys():
            self._on_ring = set(named)
            self._ring = sorted((_point(f"{r} {p}"), r) for r in named for p in range(_POINTS))
        queues = {
            name: self.replica_queue_len_cache.get(one.replica_id) or 0
            for name, one in named.items()
        }
        bound = math.ceil(_FACTOR * (sum(queues.values()) + 1) / len(queues))
        model = pending_request.metadata.multiplexed_model_id if pending_request else ""
        at = bisect_right(self._ring, (_point(model), ""))
        turn = [*self._ring[at:], *self._ring[:at]]
        return [[named[next(name for _, name in turn if queues[name] < bound)]]]


def two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Two at random, if there are so many."""
    return random.sample(replicas, min(2, len(replicas)))


def _point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
