"""The event loop: requests arrive, are routed, and run to their ends."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np

from lorikeet.simulator.memory import Arena, ByteLru
from lorikeet.simulator.replica import Replica
from lorikeet.simulator.traffic import Scenario
from lorikeet_engine.popularity import Floats
from lorikeet_engine.residency.eviction import EvictionPolicy


class Router(Protocol):
    """Gives each request a replica."""

    def route(self, fleet: "Fleet", request: int, now_s: float) -> Replica:
        """The replica that gets it."""


class Fleet:
    """One run of a scenario under one router and one eviction policy.

    ttft_s, hits, served_by: [requests], what became of each; a request for the base model is a hit.
    loads: when each load onto a GPU began, and its bytes. on_gpu, on_host, on_disk: for each
    adapter the replicas that have it there; on_gpu also those that are loading it. in_flight:
    requests without a last token.
    """

    def __init__(self, scenario: Scenario, router: Router, policy: EvictionPolicy) -> None:
        self.scenario, self._router = scenario, router
        self.requests = requests = scenario.requests()
        self.prompts: list[int] = requests.prompts.tolist()
        self.answers: list[int] = requests.answers.tolist()
        self.adapter_of: list[int] = requests.adapters.tolist()
        self.ranks: list[int] = scenario.ranks.tolist()
        self.sizes: list[int] = scenario.sizes.tolist()
        self.ttft_s: Floats = np.full(len(requests), math.nan)
        self.hits = np.zeros(len(requests), dtype=bool)
        self.served_by = np.full(len(requests), -1, dtype=np.int64)
        self.loads: list[tuple[float, int]] = []
        self.in_flight = 0
        self.on_gpu: list[list[Replica]] = [[] for _ in self.sizes]
        self.on_host: list[list[Replica]] = [[] for _ in self.sizes]
        self.on_disk: list[list[Replica]] = [[] for _ in self.sizes]
        self.names = [str(adapter) for adapter in range(scenario.adapters)]
        self.replicas = [self._replica(number, policy) for number in range(scenario.replicas)]
        self._arrived_s = requests.times_s.tolist()
        self._first_s: list[float] = [math.nan] * len(requests)
        self._now_s = 0.0
        self._numbers = count()
        # (time, number, replica and version of its step, or None and what to do)
        self._events: list[tuple[float, int, Replica | None, int | Callable[[float], None]]] = []

    def run(self) -> None:
        """All requests, to their ends."""
        route, hits, served_by = self._router.route, [], []
        for request, at_s in enumerate(self._arrived_s):
            self._run_until(at_s)
            self._now_s = at_s
            replica = route(self, request, at_s)
            self.in_flight += 1
            served_by.append(replica.number)
            hits.append(replica.submit(request, at_s))
        self._run_until(math.inf)
        self.hits[:], self.served_by[:] = hits, served_by
        self.ttft_s[:] = np.array(self._first_s) - self.requests.times_s

    # What replicas ask of their World.

    def at(self, time_s: float, act: Callable[[float], None]) -> None:
        """See World."""
        heappush(self._events, (time_s, next(self._numbers), None, act))

    def step_at(self, time_s: float, replica: Replica) -> None:
        """See World."""
        replica.version += 1
        heappush(self._events, (time_s, next(self._numbers), replica, replica.version))

    def answered(self, request: int, now_s: float) -> None:
        """See World."""
        assert math.isnan(self._first_s[request])
        self._first_s[request] = now_s

    def ended(self, replica: Replica) -> None:  # noqa: ARG002
        """See World."""
        self.in_flight -= 1

    def placed(self, adapter: int, replica: Replica) -> None:
        """See World."""
        self.on_gpu[adapter].append(replica)
        self.loads.append((self._now_s, self.sizes[adapter]))

    def _run_until(self, end_s: float) -> None:
        events = self._events
        while events and events[0][0] <= end_s:
            now_s, _, replica, what = heappop(events)
            if replica is None:
                self._now_s = now_s
                what(now_s)  # type: ignore[operator]
            elif what == replica.version:
                self._now_s = now_s
                replica.step(now_s)

    def _replica(self, number: int, policy: EvictionPolicy) -> Replica:
        room, total = self.scenario, int(self.scenario.sizes.sum())
        # An adapter that could never be placed would wait for ever.
        gpu = max(int(total * room.gpu_room), max(self.sizes))

        def tier(share: float, holders: list[list[Replica]]) -> ByteLru:
            def came(adapter: int) -> None:
                holders[adapter].append(replica)

            def left(adapter: int) -> None:
                holders[adapter].remove(replica)

            return ByteLru(int(total * share), self.sizes, came, left)

        def evicted(adapter: int) -> None:
            self.on_gpu[adapter].remove(replica)

        arena = Arena(gpu, self.sizes, self.names, policy, evicted)
        host, disk = tier(room.host_room, self.on_host), tier(room.disk_room, self.on_disk)
        replica = Replica(number, self, room.costs, arena, host, disk)
        order = np.random.default_rng([room.seed, number]).permutation(len(self.sizes))
        filled = np.cumsum(room.sizes[order]) <= total * room.disk_room
        for adapter in order[filled].tolist():
            disk.add(adapter)
        return replica
