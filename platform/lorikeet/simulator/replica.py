"""One replica: its batch as a fluid, its adapters in their tiers.

All sequences that decode get one token a step, so they share a clock that counts steps: it runs as
fast as the batch allows, and a sequence ends when the clock has gone on by its answer. Prompts
begin with a step, in turns of their tenants once their adapters are there, and share it as far as
it has room. So a request is a handful of events, however many tokens it has.
"""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import chain

from lorikeet.routing.choice import Load
from lorikeet.routing.costs import Costs
from lorikeet.simulator.line import Line
from lorikeet.simulator.memory import Arena, ByteLru, Link
from lorikeet.simulator.world import World
from lorikeet_engine.adapter import Residency

# As in the engine: what waits to be prefetched, and what is at one time.
_WISHES, _COMING = 64, 2
# Of a step: a clock so near to a whole number was to be one.
_NEARLY = 1e-6


class Replica:
    """load: what the router may know of it. line: those whose prompt can be computed.

    version: of its next step, for the fleet.
    """

    def __init__(
        self, number: int, world: World, costs: Costs, arena: Arena, host: ByteLru, disk: ByteLru
    ) -> None:
        self.number, self._world, self._steps = number, world, costs.steps
        self.arena, self.host, self.disk = arena, host, disk
        loads = costs.loads
        self._copies = Link(loads.host_latency_s, loads.host_bytes_per_s)
        self._reads = Link(loads.disk_latency_s, loads.disk_bytes_per_s)
        self._downloads = Link(loads.remote_latency_s, loads.remote_bytes_per_s)
        self.load = Load(room_bytes=arena.room)
        self.outstanding = 0
        self.version = 0
        self._waiting: dict[int, list[int]] = {}  # the requests that wait for each adapter
        self._landed: deque[int] = deque()  # adapters on the host that wait for room
        self.line = Line()
        self._prompts: dict[int, int] = {}  # requests that have begun → prompt tokens left
        self._boundary_s = math.inf  # of the step with prompts, or before the first of them
        self._computing = False  # whether this step has prompts
        self._ends: list[tuple[float, int]] = []  # clock at its end, request
        self.decoding: dict[int, int] = {}  # adapter → its sequences
        self._clock, self._rate, self._as_of_s = 0.0, 0.0, 0.0
        self._dead = False
        self._wished: deque[tuple[int, Residency, float]] = deque(maxlen=_WISHES)
        self._coming: dict[int, tuple[Residency, float]] = {}  # being brought for no request

    def tier(self, adapter: int) -> Residency:
        """Where it has it; what is on its way to the GPU counts as on the host."""
        resident = self.arena.residents.get(adapter)
        if resident is not None:
            return Residency.HOST if resident.arriving else Residency.GPU
        if adapter in self.host:
            return Residency.HOST
        return Residency.DISK if adapter in self.disk else Residency.REMOTE

    def awaits(self, adapter: int) -> bool:
        """Whether requests wait for it here, so that it is on its way to the GPU."""
        return adapter in self._waiting

    def submit(self, request: int, now_s: float) -> Residency:
        """Take a request; where its adapter is, on the GPU if it needs none."""
        self.outstanding += 1
        self.load.waiting += 1
        self.load.waiting_tokens += self._world.prompts[request]
        adapter = self._world.adapter_of[request]
        if adapter < 0 or self.arena.holds(adapter):
            self._begin(request, now_s)
            return Residency.GPU
        tier = self.tier(adapter)
        if adapter in self._waiting:
            self._waiting[adapter].append(request)
        else:
            self._waiting[adapter] = [request]
            self._bring(adapter, now_s)
        return tier

    def step(self, now_s: float) -> None:
        """A sequence has its last token, or else a step ends that prompts share or wait for."""
        self._advance(now_s)
        if self._ends and self._ends[0][0] <= self._clock + _NEARLY:
            self._clock, request = heappop(self._ends)
            self._end_decode(request, now_s)
        else:
            self._clock, self._boundary_s = float(round(self._clock)), math.inf
            if self._computing:
                self._end_prompts(now_s)
        self._go_on(now_s)

    def prefetch(self, adapter: int, tier: Residency, uses: float, now_s: float) -> None:
        """Bring it up to this tier if that costs nobody; behind what requests wait for."""
        self._wished.append((adapter, tier, uses))
        self._grant(now_s)

    def idle(self) -> bool:
        """Nothing is left that it would do."""
        queues = (self._waiting, self._landed, self.line, self._ends, self.decoding)
        leased = any(self.arena.leased(adapter) for adapter in self.arena.residents)
        return not self._prompts and not any(queues) and not leased and not self.outstanding

    def keep(self, adapter: int) -> bool:
        """Have it on the GPU from now on, if there is room; before the first request only."""
        kept = self.arena.keep(adapter)
        self.load.room_bytes = self.arena.room
        return kept

    def die(self) -> tuple[list[int], int]:
        """Do nothing any more; its requests without a first token, and how many had theirs."""
        self._dead = True
        self.version += 1
        waiting = [*chain.from_iterable(self._waiting.values()), *self.line, *self._prompts]
        return sorted(waiting), self.outstanding - len(waiting)

    def _bring(self, adapter: int, now_s: float) -> None:
        self.load.loading_bytes += self._world.sizes[adapter]
        self._world.wanted(adapter, self)
        if adapter in self._coming:  # from now on for requests
            del self._coming[adapter]
        elif adapter in self.arena.residents:
            pass  # it is being copied
        elif self.host.use(adapter):
            self._queue(adapter, now_s)
        else:
            self._fetch(adapter, now_s)

    def _fetch(self, adapter: int, now_s: float) -> None:
        """From the disk or from afar to the host."""
        size, at_s = self._world.sizes[adapter], now_s
        if not self.disk.use(adapter):
            at_s = self._downloads.carry(size, at_s)
        if at_s > now_s:
            self._later(at_s, self._downloaded, adapter)
        else:
            self._read(adapter, now_s)

    def _downloaded(self, adapter: int, now_s: float) -> None:
        self.disk.add(adapter)
        self._read(adapter, now_s)

    def _read(self, adapter: int, now_s: float) -> None:
        through_s = self._reads.carry(self._world.sizes[adapter], now_s)
        self._later(through_s, self._on_host, adapter)

    def _on_host(self, adapter: int, now_s: float) -> None:
        self.host.add(adapter)
        wish = self._coming.pop(adapter, None)
        if wish is None:
            self._queue(adapter, now_s)
        else:
            self._raise(adapter, *wish, now_s)
            self._grant(now_s)

    def _queue(self, adapter: int, now_s: float) -> None:
        self._landed.append(adapter)
        self._admit(now_s)

    def _admit(self, now_s: float) -> None:
        """Place the adapters in line, in their order."""
        while self._landed and self.arena.place(self._landed[0], now_s):
            self._place(self._landed.popleft(), now_s)

    def _grant(self, now_s: float) -> None:
        """Begin what was wished for, while nothing is brought for requests."""
        while self._wished and not self._waiting and len(self._coming) < _COMING:
            adapter, tier, uses = self._wished.popleft()
            if adapter in self.arena.residents or adapter in self._coming:
                continue
            if adapter in self.host:
                self._raise(adapter, tier, uses, now_s)
            else:
                self._coming[adapter] = tier, uses
                self._fetch(adapter, now_s)

    def _raise(self, adapter: int, tier: Residency, uses: float, now_s: float) -> None:
        """From the host to the GPU, if that is wished and nothing there is worth more."""
        if tier is not Residency.GPU or self._landed:
            return
        if self.arena.prefetch(adapter, uses, now_s):
            self._place(adapter, now_s)

    def _place(self, adapter: int, now_s: float) -> None:
        """Its room is there: copy it."""
        self._world.placed(adapter, self)
        through_s = self._copies.carry(self._world.sizes[adapter], now_s)
        self._later(through_s, self._arrived, adapter)
        self.load.room_bytes = self.arena.room

    def _arrived(self, adapter: int, now_s: float) -> None:
        self.arena.arrived(adapter)
        self.load.room_bytes = self.arena.room
        if adapter in self._waiting:
            self.load.loading_bytes -= self._world.sizes[adapter]
            for request in self._waiting.pop(adapter):
                self._begin(request, now_s)
        self._grant(now_s)

    def _begin(self, request: int, now_s: float) -> None:
        """Its adapter is there."""
        adapter = self._world.adapter_of[request]
        if adapter >= 0:
            self.arena.lease(adapter, now_s)
            self.load.room_bytes = self.arena.room
        self.line.add(request, self._world.tenant_of[request])
        if self._boundary_s == math.inf and self.load.running < self._steps.max_running:
            self._advance(now_s)
            self._go_on(now_s)

    def _first_token(self, request: int, now_s: float) -> None:
        load = self.load
        load.waiting -= 1
        load.waiting_tokens -= self._world.prompts[request]
        self._world.answered(request, now_s)
        adapter, left = self._world.adapter_of[request], self._world.answers[request] - 1
        if left == 0:
            self._end(adapter, now_s)
            return
        self.line.begun(self._world.tenant_of[request])
        heappush(self._ends, (self._clock + left, request))
        load.running += 1
        if adapter >= 0:
            sequences = self.decoding.get(adapter, 0)
            self.decoding[adapter] = sequences + 1
            if not sequences:
                load.ranks += self._world.ranks[adapter]

    def _end_decode(self, request: int, now_s: float) -> None:
        adapter = self._world.adapter_of[request]
        self.line.ended(self._world.tenant_of[request])
        self.load.running -= 1
        if adapter >= 0:
            self.decoding[adapter] -= 1
            if not self.decoding[adapter]:
                del self.decoding[adapter]
                self.load.ranks -= self._world.ranks[adapter]
        self._end(adapter, now_s)

    def _end(self, adapter: int, now_s: float) -> None:
        self.outstanding -= 1
        self._world.ended(self)
        if adapter < 0:
            return
        self.arena.release(adapter)
        self.load.room_bytes = self.arena.room
        if self._landed:
            self._admit(now_s)

    def _later(self, at_s: float, act: Callable[[int, float], None], adapter: int) -> None:
        def unless_dead(now_s: float) -> None:
            if not self._dead:
                act(adapter, now_s)

        self._world.at(at_s, unless_dead)

    def _advance(self, now_s: float) -> None:
        steps = self._rate * (now_s - self._as_of_s)
        self._clock += steps
        self._as_of_s = now_s
        if steps:
            self.line.decoded(steps)
            self._world.gaps[int(1e4 / self._rate)] += steps * self.load.running

    def _end_prompts(self, now_s: float) -> None:
        """A step is over: those whose prompt is computed have their first token."""
        self._computing = False
        for request in [request for request, left in self._prompts.items() if not left]:
            del self._prompts[request]
            self._first_token(request, now_s)

    def _go_on(self, now_s: float) -> None:
        """Let a step with prompts begin when it can; say when something happens next."""
        load, steps = self.load, self._steps
        if self._boundary_s == math.inf:
            begun = self._clock % 1.0
            if not self._has_prompts():
                self._rate = 1.0 / steps.decode_s(load.running, load.ranks) if load.running else 0.0
            elif load.running and _NEARLY < begun < 1.0 - _NEARLY:
                step_s = steps.decode_s(load.running, load.ranks)
                self._boundary_s, self._rate = now_s + (1.0 - begun) * step_s, 1.0 / step_s
            else:
                self._begin_prompts(now_s)
        next_s = self._boundary_s
        if self._ends and self._rate:
            left = max(0.0, self._ends[0][0] - self._clock)
            next_s = min(next_s, now_s + left / self._rate)
        if next_s < math.inf:
            self._world.step_at(next_s, self)

    def _has_prompts(self) -> bool:
        """Whether the next step has, as far as it is known."""
        seats = self._steps.max_running - self.load.running
        return bool(self._prompts) or bool(self.line and seats > 0)

    def _begin_prompts(self, now_s: float) -> None:
        """A step begins, with as many tokens of prompts as it has room for beside the decodes."""
        load, steps, world = self.load, self._steps, self._world
        room = steps.step_tokens - load.running
        seats = steps.max_running - load.running
        while self.line and len(self._prompts) < seats and sum(self._prompts.values()) < room:
            request = self.line.next(world.prompts)
            self._prompts[request] = world.prompts[request]
        tokens = 0
        for request, left in self._prompts.items():
            chunk = min(left, room - tokens)
            self._prompts[request] = left - chunk
            tokens += chunk
        adapted = any(world.adapter_of[request] >= 0 for request in self._prompts)
        takes_s = steps.prefill_s(tokens, int(adapted), load.running, load.ranks)
        self._boundary_s, self._rate = now_s + takes_s, 1.0 / takes_s
        self._computing = True
