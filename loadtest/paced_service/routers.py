"""The product's router, two ways to bend it, and the simulator's baselines, for Serve."""

import math
import random
from collections import OrderedDict, defaultdict
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from loadtest.simulator.baselines import BOUND, HashRing
from lorikeet.serving.request_router import AdapterAffinityRouter, call_of


class ScaledCosts(AdapterAffinityRouter):
    """The product's router with other weights, where a second is worth less."""

    def initialize_state(self, **prices: Any) -> None:
        """prices: fields of Costs."""
        super().initialize_state()
        self._fleet._costs = replace(self._fleet._costs, **prices)


class SeedsChooseReplicas(ScaledCosts):
    """Requests for one adapter go to the replica that their seed counts to; others by the costs.

    So requests with seeds in a row reach as many replicas, whichever gateways they come to.
    """

    def initialize_state(self, name: str, **prices: Any) -> None:
        """name: the adapter's, without its tenant."""
        super().initialize_state(**prices)
        self._name = name

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Choose the one replica, or as the costs do."""
        call = call_of(pending_request)
        if call is None or call.adapter is None or call.adapter.name != self._name:
            return await super().choose_replicas(candidate_replicas, pending_request)
        ordered = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        return [[ordered[(call.sampling.seed or 0) % len(ordered)]]]


class BaselineRouter(AdapterAffinityRouter):
    """The base of all routers but the product's, for calls that any replica may take.

    What the product's does for its Fleet stays: a gateway knows by it whose answers to listen to.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve takes the shortest queue of those chosen; without an adapter, of two at random."""
        if pending_request is not None and "replica" in pending_request.kwargs:
            return await super().choose_replicas(candidate_replicas, pending_request)
        model = _model_of(pending_request)
        return [self.choose(candidate_replicas, model) if model else two_of(candidate_replicas)]

    def choose(self, replicas: list[RunningReplica], model: str) -> list[RunningReplica]:
        """Replicas that a call for an adapter may go to. model: its digest."""
        raise NotImplementedError


class PowerOfTwo(BaselineRouter):
    """The less busy of two at random, as Serve's default router is where no model is named."""

    def choose(self, replicas: list[RunningReplica], model: str) -> list[RunningReplica]:
        """Two at random."""
        del model
        return two_of(replicas)


class Multiplexing(BaselineRouter):
    """Serve's model multiplexing: where the model is; else where the fewest are.

    Records what Serve's replicas would: the last models used on each.
    """

    def initialize_state(self, models: int = 1, **_: Any) -> None:
        """models: max_num_models_per_replica, in Serve's words."""
        super().initialize_state()
        self._most = models
        self._models: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def choose(self, replicas: list[RunningReplica], model: str) -> list[RunningReplica]:
        """Two of those with the model, or with the fewest."""
        held = [self._models[one.replica_id.unique_id] for one in replicas]
        pairs = list(zip(replicas, held, strict=True))
        free = [one for one, models in pairs if model in models]
        if not free:
            fewest = min(map(len, held))
            free = [one for one, models in pairs if len(models) == fewest]
        return two_of(free)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """A replica took it."""
        super().on_request_routed(pending_request, replica_id, result)
        models, model = self._models[replica_id.unique_id], _model_of(pending_request)
        if not model:
            return
        models[model] = None
        models.move_to_end(model)
        if len(models) > self._most:
            models.popitem(last=False)


class BoundedHashing(BaselineRouter):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

    As in the simulator; Serve knows queues where that counts requests.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve once it is built."""
        super().initialize_state()
        self._ring, self._on_ring = HashRing(()), set[str]()

    def choose(self, replicas: list[RunningReplica], model: str) -> list[RunningReplica]:
        """One replica."""
        named = {one.replica_id.unique_id: one for one in replicas}
        if self._on_ring != named.keys():
            self._ring, self._on_ring = HashRing(named), set(named)
        queues = {
            name: self.replica_queue_len_cache.get(one.replica_id) or 0
            for name, one in named.items()
        }
        bound = math.ceil(BOUND * (sum(queues.values()) + 1) / len(queues))
        names = self._ring.names_from(model)
        return [named[next(name for name in names if queues[name] < bound)]]


def two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Two at random, or all if there are fewer."""
    return random.sample(replicas, min(2, len(replicas)))


def _model_of(pending: PendingRequest | None) -> str:
    """The digest of the call's adapter; empty for the base model and for other calls."""
    call = call_of(pending)
    return call.adapter.digest if call is not None and call.adapter is not None else ""
