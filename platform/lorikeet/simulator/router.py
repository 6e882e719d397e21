"""The product's routing over simulated replicas: each gateway ranks by its own view."""

from dataclasses import replace
from functools import partial
from random import Random

from lorikeet.protocol.messages import Candidate, Work
from lorikeet.rendezvous import rendezvous_candidates
from lorikeet.routing.ranking import (
    Holders,
    ReplicaOption,
    RoutingStatus,
    candidate_sample,
    rank_by_cost,
)
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.replica import SimulatedReplica


class LeastCostRouter:
    """Router to the replica with the lowest expected cost in a sample, as the gateway sees it.

    A gateway's view of a replica's status is up to status_age_s old, updated by the requests that
    the gateway itself has sent since. Locations of adapters are pushed on change, so the gateway's
    view of locations is current.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._replicas: list[SimulatedReplica] = []
        self._named: dict[str, SimulatedReplica] = {}
        # (gateway, replica) → (time of the status, status)
        self._seen: dict[tuple[int, int], tuple[float, RoutingStatus]] = {}

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:
        """Choose the replica of a request.

        request: index of the request in the fleet's tables.
        now_s: simulated time.
        """
        chosen = self.rank(fleet, request, now_s)[0].replica
        self._status(fleet, request, chosen, now_s).add_waiting(fleet.prompts[request])
        return chosen

    def rank(
        self, fleet: SimulatedFleet, request: int, now_s: float
    ) -> list[Candidate[SimulatedReplica]]:
        """Return a few replicas in order of the request's expected cost, the lowest first."""
        if self._replicas is not fleet.replicas:
            self._replicas, self._seen = fleet.replicas, {}
            self._named = {one.name: one for one in fleet.replicas}
        adapter, work, holders = fleet.adapter_of[request], Work(fleet.prompts[request]), None
        if adapter is not None:
            work = Work(work.prompt_tokens, fleet.ranks[adapter], fleet.sizes[adapter])
            off_gpu = fleet.on_host[adapter] or fleet.on_disk[adapter]
            rendezvous = partial(self._rendezvous, fleet.names[adapter])
            holders = Holders(fleet.on_gpu[adapter], off_gpu, rendezvous)
        sample = candidate_sample(holders, fleet.replicas, self._rng)
        return rank_by_cost(work, [self._option(fleet, request, one, now_s) for one in sample])

    def _rendezvous(self, name: str) -> list[SimulatedReplica]:
        return [self._named[one] for one in rendezvous_candidates(name, tuple(self._named))]

    def _option(
        self, fleet: SimulatedFleet, request: int, replica: SimulatedReplica, now_s: float
    ) -> ReplicaOption[SimulatedReplica]:
        status, costs = self._status(fleet, request, replica, now_s), fleet.setup.costs
        if (adapter := fleet.adapter_of[request]) is None:
            return ReplicaOption(replica, status, costs)
        tier, running = replica.tier(adapter), adapter in replica.decoding
        loading = adapter in replica.waiting
        evicted_uses = 0.0 if loading else replica.arena.evicted_uses(adapter, now_s)
        return ReplicaOption(replica, status, costs, tier, running, evicted_uses, loading=loading)

    def _status(
        self, fleet: SimulatedFleet, request: int, replica: SimulatedReplica, now_s: float
    ) -> RoutingStatus:
        """Return a replica's status in the view of the request's gateway.

        The object is shared by the gateway's requests: the caller adds each request that it sends.
        """
        key = request % fleet.setup.gateways, replica.number
        seen = self._seen.get(key)
        if seen is None or now_s >= seen[0] + fleet.setup.status_age_s:
            self._seen[key] = seen = now_s, replace(replica.status, room_bytes=replica.arena.room)
        return seen[1]
