"""Simulated replica: a fluid model of its batch, and its adapters in their tiers.

All decoding sequences get one token per step, so they share one clock that counts steps. The clock
runs as fast as steps of the current batch take, and a sequence ends when the clock has advanced by
the length of its answer. Requests queue as soon as their adapters are loaded, and their prompts
join at the start of a step, in the queue's order, as far as the step's token limit allows.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from lorikeet.routing.locations import decrement
from lorikeet.routing.ranking import RoutingStatus
from lorikeet.simulator.memory import Arena, ByteLru, Link, SystemPrompts
from lorikeet.simulator.traffic import FleetSetup
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import StepCosts, seen_tokens
from lorikeet_engine.residency.eviction_score import LeastUsedForItsSize

_Changed = Callable[[int], None]  # called with an adapter
_NEARLY = 1e-6  # steps; a clock this near to a whole number counts as whole


class _Fleet(Protocol):
    """The fleet as its replicas use it: tables of requests and adapters, clock, and reports.

    prompts, answers, adapter_of: tokens and adapter of each request, [requests].
    ranks, sizes, names: LoRA rank, bytes and name of each adapter, [adapters].
    on_gpu, on_host, on_disk: replicas that hold each adapter in this tier, [adapters].
    gaps: number of tokens by the time since the previous token, in units of 0.1 ms.
    loads: number of loads onto GPUs.
    """

    setup: FleetSetup
    prompts: list[int]
    answers: list[int]
    adapter_of: list[int | None]
    ranks: list[int]
    sizes: list[int]
    names: list[str]
    on_gpu: list[list["SimulatedReplica"]]
    on_host: list[list["SimulatedReplica"]]
    on_disk: list[list["SimulatedReplica"]]
    gaps: defaultdict[int, float]
    loads: int

    def schedule(self, time_s: float, act: Callable[[float], object]) -> None: ...

    def on_first_token(self, request: int, now_s: float) -> None: ...


class SimulatedReplica:
    """One replica. Requests and adapters are indexes into the fleet's tables.

    status: load that routers see, without `room_bytes`, which they take from the arena (the GPU's
        memory for adapters).
    waiting: adapter → requests that wait for the adapter.
    queue: requests that can start prefill, once the KV cache has room for prompt and answer.
    decoding: adapter → number of its decoding sequences.
    """

    def __init__(self, number: int, fleet: _Fleet) -> None:
        self.number, self.name, self._fleet = number, str(number), fleet
        setup, sizes = fleet.setup, fleet.sizes
        gpu_bytes = max(setup.gpu_bytes, max(sizes))  # a larger adapter would wait for ever
        self._requested, evicted = self._callbacks(fleet.on_gpu)
        self.arena = Arena(gpu_bytes, sizes, fleet.names, LeastUsedForItsSize(), evicted)
        self.host = ByteLru(setup.host_bytes, sizes, *self._callbacks(fleet.on_host))
        self.disk = ByteLru(setup.disk_bytes, sizes, *self._callbacks(fleet.on_disk))
        self._steps, loads = setup.costs.steps, setup.costs.loads
        self._copies = Link(loads.host_latency_s, loads.host_bytes_per_s)
        self._reads = Link(loads.disk_latency_s, loads.disk_bytes_per_s)
        self._downloads = Link(loads.remote_latency_s, loads.remote_bytes_per_s)
        self.status = RoutingStatus()
        self._next_step = 0  # number of the scheduled step; events of earlier numbers are void
        self.waiting: dict[int, list[int]] = {}
        self._blocked: deque[int] = deque()  # adapters on the host that wait for GPU memory
        self.queue: deque[int] = deque()
        self._prompts: dict[int, int] = {}  # requests in prefill → prompt tokens left
        self._kv_left = setup.kv_tokens
        self._system_tokens: list[int] = [0] * len(sizes)
        if setup.system_tokens is not None:
            self._system_tokens = setup.system_tokens.tolist()
        self.system_prompts = SystemPrompts(self._system_tokens, setup.kv_host_tokens)
        self._boundary_s = math.inf  # end of the step with prompts, or of the one before them
        self._computing = False  # whether the current step has prompts
        self._ends: list[tuple[float, int]] = []  # heap of (clock at its last token, request)
        self.decoding: Counter[int] = Counter()
        self._clock = self._rate = self._as_of_s = 0.0
        self._context = _DecodeContext(fleet, self._steps)

    def tier(self, adapter: int) -> Residency:
        """Return the tier of an adapter; HOST while it is being copied to the GPU."""
        resident = self.arena.residents.get(adapter)
        if resident is not None:
            return Residency.HOST if resident.loading else Residency.GPU
        if adapter in self.host:
            return Residency.HOST
        return Residency.DISK if adapter in self.disk else Residency.REMOTE

    def cached_system_tokens(self, request: int) -> tuple[int, Residency]:
        """Return the number of a request's prompt tokens that are a cached system prompt, and their
        tier.
        """
        adapter = self._fleet.adapter_of[request]
        tier = Residency.REMOTE if adapter is None else self.system_prompts.tier(adapter)
        return 0 if tier is Residency.REMOTE else self._system_part(request), tier

    def submit(self, request: int, now_s: float) -> Residency:
        """Accept a request; return the tier of its adapter, GPU if it needs none."""
        self.status.add_waiting(self._fleet.prompts[request])
        adapter = self._fleet.adapter_of[request]
        if adapter is None or self.arena.holds(adapter):
            self._begin(request, now_s)
            return Residency.GPU
        tier = self.tier(adapter)
        if adapter in self.waiting:
            self.waiting[adapter].append(request)
        else:
            self.waiting[adapter] = [request]
            self._request(adapter, now_s)
        return tier

    def _step(self, number: int, now_s: float) -> None:
        """Process this replica's next event: a sequence's last token, or the end of a step.

        number: number of the scheduled event; an outdated one is ignored.
        """
        if number != self._next_step:
            return  # rescheduled meanwhile
        self._advance(now_s)
        if self._ends and self._ends[0][0] <= self._clock + _NEARLY:
            self._clock, request = heappop(self._ends)
            self._end_decode(request, now_s)
        else:
            self._clock, self._boundary_s = float(round(self._clock)), math.inf
            if self._computing:
                self._end_prompts(now_s)
        self._schedule_step(now_s)

    def _callbacks(self, holders: list[list["SimulatedReplica"]]) -> tuple[_Changed, _Changed]:
        """Return a tier's two callbacks: one adds this replica to the holders of an adapter, one
        removes it.

        holders: replicas that hold each adapter in the tier, [adapters].
        """
        return (lambda each: holders[each].append(self)), (lambda each: holders[each].remove(self))

    def _request(self, adapter: int, now_s: float) -> None:
        self.status.loading_bytes += self._fleet.sizes[adapter]
        self._requested(adapter)
        if self.host.use(adapter):
            self._blocked.append(adapter)
            self._place_next(now_s)
        else:
            self._fetch(adapter, now_s)

    def _fetch(self, adapter: int, now_s: float) -> None:
        """Load an adapter from the disk or the store to the host."""
        if self.disk.use(adapter):
            self._read(adapter, now_s)
        else:
            here_s = self._downloads.carry(self._fleet.sizes[adapter], now_s)
            self._schedule(here_s, self._downloaded, adapter)

    def _downloaded(self, adapter: int, now_s: float) -> None:
        self.disk.add(adapter)
        self._read(adapter, now_s)

    def _read(self, adapter: int, now_s: float) -> None:
        through_s = self._reads.carry(self._fleet.sizes[adapter], now_s)
        self._schedule(through_s, self._on_host, adapter)

    def _on_host(self, adapter: int, now_s: float) -> None:
        self.host.add(adapter)
        self._blocked.append(adapter)
        self._place_next(now_s)

    def _place_next(self, now_s: float) -> None:
        """Start to copy adapters that wait for GPU memory, in order of arrival, as long as they
        fit.
        """
        while self._blocked and self.arena.place(self._blocked[0], now_s):
            self._place(self._blocked.popleft(), now_s)

    def _place(self, adapter: int, now_s: float) -> None:
        """Start the copy of an adapter to the GPU; the arena has reserved its bytes."""
        self._fleet.loads += 1
        size = self._fleet.sizes[adapter]
        self._schedule(self._copies.carry(size, now_s), self._loaded, adapter)

    def _loaded(self, adapter: int, now_s: float) -> None:
        self.arena.finish_load(adapter)
        self.status.loading_bytes -= self._fleet.sizes[adapter]
        for request in self.waiting.pop(adapter):
            self._begin(request, now_s)

    def _begin(self, request: int, now_s: float) -> None:
        """Queue a request whose adapter is on the GPU, after its system prompt has come from the
        host, if it is there and that pays.
        """
        adapter = self._fleet.adapter_of[request]
        if adapter is not None:
            self.arena.lease(adapter, now_s)
        if adapter is None or self.system_prompts.tier(adapter) is not Residency.HOST:
            self._queue(request, now_s)
            return
        tokens = self._system_tokens[adapter]
        size = tokens * self._fleet.setup.kv_token_bytes
        if self._fetch_s(size) < self._steps.prompts_s(tokens, seen_tokens(tokens)):
            here_s = self._copies.carry(size, now_s)
            self._schedule(here_s, partial(self._fetched, adapter), request)
        else:
            self._queue(request, now_s)

    def _fetched(self, adapter: int, request: int, now_s: float) -> None:
        self.system_prompts.bring(adapter)
        self.system_prompts.trim(self._kv_left)
        self._queue(request, now_s)

    def _queue(self, request: int, now_s: float) -> None:
        self.queue.append(request)
        if self._boundary_s == math.inf and self.status.running < self._steps.max_running:
            self._advance(now_s)
            self._schedule_step(now_s)

    def _first_token(self, request: int, now_s: float) -> None:
        status = self.status
        status.remove_waiting(self._fleet.prompts[request])
        self._fleet.on_first_token(request, now_s)
        adapter, left = self._fleet.adapter_of[request], self._fleet.answers[request] - 1
        if left == 0:
            self._end(request, now_s)
            return
        heappush(self._ends, (self._clock + left, request))
        status.running += 1
        self._context.add(request, self._clock)
        if adapter is not None:
            status.ranks += 0 if self.decoding[adapter] else self._fleet.ranks[adapter]
            self.decoding[adapter] += 1

    def _end_decode(self, request: int, now_s: float) -> None:
        adapter = self._fleet.adapter_of[request]
        self.status.running -= 1
        self._context.remove(request, self._clock)
        if adapter is not None:
            decrement(self.decoding, adapter)
            self.status.ranks -= 0 if self.decoding[adapter] else self._fleet.ranks[adapter]
        self._end(request, now_s)

    def _end(self, request: int, now_s: float) -> None:
        self._kv_left += self._own_tokens(request)
        if (adapter := self._fleet.adapter_of[request]) is not None:
            self._kv_left += self.system_prompts.release(adapter)
            self.arena.release(adapter)
            self._place_next(now_s)

    def _schedule(self, at_s: float, act: Callable[[int, float], None], adapter: int) -> None:
        self._fleet.schedule(at_s, partial(act, adapter))

    def _advance(self, now_s: float) -> None:
        steps, self._as_of_s = self._rate * (now_s - self._as_of_s), now_s
        self._clock += steps
        if steps:
            self._fleet.gaps[int(1e4 / self._rate)] += steps * self.status.running

    def _end_prompts(self, now_s: float) -> None:
        """End a step: give a first token to each request whose prompt is complete."""
        self._computing = False
        for request in [request for request, left in self._prompts.items() if not left]:
            del self._prompts[request]
            self._first_token(request, now_s)

    def _schedule_step(self, now_s: float) -> None:
        """Begin a step with prompts if possible, and schedule the next event."""
        status, steps = self.status, self._steps
        if self._boundary_s == math.inf:
            status.context = self._context.at(self._clock)
            step_s = steps.step_s(status.running, status.ranks, status.context)
            begun, full = self._clock % 1.0, status.running >= steps.max_running
            if not self._prompts and (full or not self._next_fits()):
                self._rate = self._decodes_per_s() if status.running else 0.0
            elif status.running and _NEARLY < begun < 1.0 - _NEARLY:
                self._boundary_s, self._rate = now_s + (1.0 - begun) * step_s, 1.0 / step_s
            else:
                self._begin_prompts(now_s)
        next_s = self._boundary_s
        if self._ends and self._rate:
            left = max(0.0, self._ends[0][0] - self._clock)
            next_s = min(next_s, now_s + left / self._rate)
        if next_s < math.inf:
            self._next_step += 1
            self._fleet.schedule(next_s, partial(self._step, self._next_step))

    def _decodes_per_s(self) -> float:
        """Return each decoding request's tokens per second, with drafts."""
        status = self.status
        at_once = status.running, status.ranks, status.context
        return self._fleet.setup.drafting.per_s(self._steps, *at_once)

    def _begin_prompts(self, now_s: float) -> None:
        """Begin a step with as many prompt tokens as its token limit allows beside the decodes."""
        status, steps, fleet = self.status, self._steps, self._fleet
        room, free = steps.step_tokens - status.running, steps.max_running - status.running
        while (
            self._next_fits() and len(self._prompts) < free and sum(self._prompts.values()) < room
        ):
            request = self.queue.popleft()
            self._prompts[request] = fleet.prompts[request]
            self._kv_left -= self._own_tokens(request)
            if (adapter := fleet.adapter_of[request]) is not None:
                if self.system_prompts.tier(adapter) is Residency.GPU:
                    self._prompts[request] -= self._system_part(request)
                self._kv_left -= self.system_prompts.use(adapter)
            self.system_prompts.trim(self._kv_left)
        tokens, adapted, seen = status.running, 0, 0
        for request, left in self._prompts.items():
            chunk = min(left, steps.step_tokens - tokens)
            self._prompts[request] = left - chunk
            tokens += chunk
            adapted += chunk if fleet.adapter_of[request] is not None else 0
            seen += seen_tokens(chunk, fleet.prompts[request] - left)
        takes_s = steps.step_s(tokens, status.ranks, status.context, adapted=adapted, seen=seen)
        self._boundary_s, self._rate, self._computing = now_s + takes_s, 1.0 / takes_s, True

    def _next_fits(self) -> bool:
        """Whether a request is queued, and the KV cache has room for the next one."""
        if not self.queue:
            return False
        request = self.queue[0]
        adapter, tokens = self._fleet.adapter_of[request], self._own_tokens(request)
        if adapter is not None:
            tokens += self.system_prompts.taken_by(adapter)
        return tokens <= self._kv_left

    def _own_tokens(self, request: int) -> int:
        """Return the tokens of a request's prompt and answer, without the system prompt, whose KV
        pages requests with the adapter share.
        """
        tokens = self._fleet.prompts[request] + self._fleet.answers[request]
        return tokens - self._system_part(request)

    def _system_part(self, request: int) -> int:
        """Return the number of tokens of a prompt that are its adapter's system prompt."""
        adapter = self._fleet.adapter_of[request]
        if adapter is None:
            return 0
        return min(self._system_tokens[adapter], self._fleet.prompts[request] - 1)

    def _fetch_s(self, size_bytes: int) -> float:
        return self._fleet.setup.costs.loads.load_s(Residency.HOST, size_bytes)


class _DecodeContext:
    """Number of tokens that the decodes of one step attend to: the sum of the requests' contexts.

    A request's context is the number of tokens that its decode attends to, averaged over layers. It
    is taken to grow linearly with the clock, which counts steps. The sum is exact without attention
    windows, and an approximation for answers that outgrow a window.
    """

    def __init__(self, fleet: _Fleet, steps: StepCosts) -> None:
        self._fleet, self._steps = fleet, steps
        # The sum is a line over the clock: its value extrapolated to clock 0, and its slope.
        self._begun = self._growth = 0.0

    def add(self, request: int, clock: float) -> None:
        """Add a request that decodes its second token in the step after `clock`.

        clock: number of steps so far.
        """
        first, growth = self._line(request)
        self._begun += first - growth * clock
        self._growth += growth

    def remove(self, request: int, clock: float) -> None:
        """Remove a request whose answer ends at the step `clock`."""
        first, growth = self._line(request)
        self._begun -= first + growth * (self._fleet.answers[request] - 1) - growth * clock
        self._growth -= growth

    def at(self, clock: float) -> int:
        """Return the number of tokens that all decoding requests together attend to in a step.

        clock: number of steps so far.
        """
        return round(self._begun + self._growth * clock)

    def _line(self, request: int) -> tuple[float, float]:
        """Return the number of tokens that a request's decode of its second token attends to, and
        the growth of this number per step.
        """
        prompt, answer = self._fleet.prompts[request], self._fleet.answers[request]
        first, last = map(self._steps.decode_sees, (prompt + 1, prompt + answer))
        return first, (last - first) / (answer - 1)
