"""Event loop of the simulation: requests arrive, are routed as the product routes, and run to their
ends.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

import numpy as np
from numpy.typing import NDArray

from lorikeet.protocol.messages import Candidate, Work
from lorikeet.rendezvous import by_preference, rendezvous_candidates
from lorikeet.routing.ranking import (
    Holders,
    ReplicaOption,
    RoutingStatus,
    candidate_sample,
    rank_by_cost,
)
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet.simulator.traffic import BASE_MODEL, FleetSetup, Requests
from lorikeet.simulator.workload_models import Floats, Ints
from lorikeet_engine.adapter import Residency


class SimulatedFleet:
    """One run of a fleet.

    prompts, answers, adapter_of: tokens and adapter of each request, [requests].
    ranks, sizes, names: LoRA rank, bytes and name of each adapter, [adapters].
    replicas: all replicas.
    router: chooses the replica of each request.
    ttft_s: seconds to the first token, [requests].
    found: tier of the adapter when the request came, GPU for the base model, [requests].
    gaps: number of tokens by the time since the previous token, in units of 0.1 ms.
    loads: number of loads onto GPUs.
    on_gpu, on_host, on_disk: replicas that hold each adapter in this tier, [adapters]; on_gpu
        includes replicas that are loading the adapter.

    gaps and loads count from the end of the warm-up.
    """

    def __init__(self, setup: FleetSetup, requests: Requests) -> None:
        self.setup, self.requests = setup, requests
        self.router = LeastCostRouter(setup.seed)
        self.prompts: list[int] = requests.prompts.tolist()
        self.answers: list[int] = requests.answers.tolist()
        adapters = requests.adapters.tolist()
        self.adapter_of: list[int | None] = [
            None if each == BASE_MODEL else each for each in adapters
        ]
        self.ranks: list[int] = setup.ranks.tolist()
        self.sizes: list[int] = setup.sizes.tolist()
        self.ttft_s: Floats = np.full(len(requests), math.nan)
        self.found: Ints = np.zeros(len(requests), int)
        self.gaps: defaultdict[int, float] = defaultdict(float)
        self.loads = 0
        self.on_gpu: list[list[SimulatedReplica]] = [[] for _ in self.sizes]
        self.on_host: list[list[SimulatedReplica]] = [[] for _ in self.sizes]
        self.on_disk: list[list[SimulatedReplica]] = [[] for _ in self.sizes]
        self.names = [str(adapter) for adapter in range(len(self.sizes))]
        self._arrived_s = requests.times_s.tolist()
        self._now_s = 0.0
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._replica_numbers = count()
        self.replicas: list[SimulatedReplica] = []
        for _ in range(setup.replicas):
            self._add_replica()
        self._pin()
        self.schedule(setup.warm_up_s, self._end_warm_up)

    @property
    def hits(self) -> NDArray[np.bool_]:
        """Mask of requests that found their adapter on the GPU, or need none, [requests]."""
        found: NDArray[np.bool_] = self.found == Residency.GPU
        return found

    def run(self) -> None:
        """Simulate all requests to their ends."""
        for request, at_s in enumerate(self._arrived_s):
            self._run_until(at_s)
            self._now_s = at_s
            replica = self.router.route(self, request, at_s)
            self.found[request] = replica.submit(request, at_s)
        self._run_until(math.inf)

    def schedule(self, time_s: float, act: Callable[[float], object]) -> None:
        """Call `act(time_s)` when the simulated clock reaches time_s."""
        heappush(self._events, (time_s, next(self._numbers), act))

    def on_first_token(self, request: int, now_s: float) -> None:
        """Record a request's time to the first token."""
        assert math.isnan(self.ttft_s[request])
        self.ttft_s[request] = now_s - self._arrived_s[request]

    def _end_warm_up(self, _now_s: float) -> None:
        self.gaps.clear()
        self.loads = 0

    def _run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self._now_s, _, act = heappop(self._events)
            act(self._now_s)

    def _add_replica(self) -> None:
        setup, number = self.setup, next(self._replica_numbers)
        replica = SimulatedReplica(number, self)
        order = np.random.default_rng([setup.seed, number]).permutation(len(self.sizes))
        filled = np.cumsum(setup.sizes[order]) <= setup.disk_bytes
        for adapter in order[filled].tolist():
            replica.disk.add(adapter)
        self.replicas = [*self.replicas, replica]

    def _pin(self) -> None:
        """Pin adapters to the replicas that the controller would choose, as far as the replicas'
        memory suffices.
        """
        replicas = {replica.name: replica for replica in self.replicas}
        for adapter, copies in self.setup.pins.items():
            for name in by_preference(self.names[adapter], replicas)[:copies]:
                if replicas[name].arena.pin(adapter):
                    self.on_gpu[adapter].append(replicas[name])


class LeastCostRouter:
    """Router to the replica with the lowest expected cost in a sample, as the gateway sees it.

    A gateway's view of a replica's status is up to status_age_s old, updated by the requests that
    the gateway itself has sent since. Locations of adapters are pushed on change, so the gateway's
    view of locations is current.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._named: dict[str, SimulatedReplica] = {}
        # (gateway, replica) → (time of the status, status)
        self._seen: dict[tuple[int, int], tuple[float, RoutingStatus]] = {}

    def route(self, fleet: "SimulatedFleet", request: int, now_s: float) -> SimulatedReplica:
        """Choose the replica of a request.

        request: index of the request in the fleet's tables.
        now_s: simulated time.
        """
        chosen = self.rank(fleet, request, now_s)[0].replica
        self._status(fleet, request, chosen, now_s).add_waiting(fleet.prompts[request])
        return chosen

    def rank(
        self, fleet: "SimulatedFleet", request: int, now_s: float
    ) -> list[Candidate[SimulatedReplica]]:
        """Return a few replicas in order of the request's expected cost, the lowest first."""
        self._named = self._named or {one.name: one for one in fleet.replicas}
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
        self, fleet: "SimulatedFleet", request: int, replica: SimulatedReplica, now_s: float
    ) -> ReplicaOption[SimulatedReplica]:
        status, costs = self._status(fleet, request, replica, now_s), fleet.setup.costs
        if (adapter := fleet.adapter_of[request]) is None:
            return ReplicaOption(replica, status, costs)
        tier, running = replica.tier(adapter), adapter in replica.decoding
        loading = adapter in replica.waiting
        evicted_uses = 0.0 if loading else replica.arena.evicted_uses(adapter, now_s)
        cached, cached_tier = replica.cached_system_tokens(request)
        on_host = cached if cached_tier is Residency.HOST else 0
        return ReplicaOption(
            replica,
            status,
            costs,
            tier,
            running,
            evicted_uses,
            cached,
            loading,
            host_tokens=on_host,
            host_bytes=on_host * fleet.setup.kv_token_bytes,
        )

    def _status(
        self, fleet: "SimulatedFleet", request: int, replica: SimulatedReplica, now_s: float
    ) -> RoutingStatus:
        """Return a replica's status in the view of the request's gateway.

        The object is shared by the gateway's requests: the caller adds each request that it sends.
        """
        key = request % fleet.setup.gateways, replica.number
        seen = self._seen.get(key)
        if seen is None or now_s >= seen[0] + fleet.setup.status_age_s:
            self._seen[key] = seen = now_s, replace(replica.status, room_bytes=replica.arena.room)
        return seen[1]
