"""Event loop of the simulation: requests arrive, are routed, and run to their ends."""

import math
from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lorikeet.rendezvous import by_preference
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet.simulator.traffic import BASE_MODEL, FleetSetup, Requests
from lorikeet.simulator.workload_models import Floats, Ints
from lorikeet_engine.adapter import Residency


class Router(Protocol):
    """Choice of a replica for each request."""

    def route(self, fleet: "SimulatedFleet", request: int, now_s: float) -> SimulatedReplica:
        """Choose the replica of a request.

        request: index of the request in the fleet's tables.
        now_s: simulated time.
        """


class SimulatedFleet:
    """One run of a fleet under one router.

    prompts, answers, adapter_of: tokens and adapter of each request, [requests].
    ranks, sizes, names: LoRA rank, bytes and name of each adapter, [adapters].
    replicas: all replicas.
    ttft_s: seconds to the first token, [requests].
    found: tier of the adapter when the request came, GPU for the base model, [requests].
    gaps: number of tokens by the time since the previous token, in units of 0.1 ms.
    loads: number of loads onto GPUs.
    on_gpu, on_host, on_disk: replicas that hold each adapter in this tier, [adapters]; on_gpu
        includes replicas that are loading the adapter.

    gaps and loads count from the end of the warm-up.
    """

    def __init__(self, setup: FleetSetup, requests: Requests, router: Router) -> None:
        self.setup, self.requests, self._router = setup, requests, router
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
            replica = self._router.route(self, request, at_s)
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
