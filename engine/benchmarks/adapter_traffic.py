"""Adapters coming and going under simulated traffic: the product's accounts without its memory.

Residents and SlotPool run at true sizes on an arena that has no memory, under a clock that jumps
from event to event. A request that finds its adapter on the GPU leases it at once; else the adapter
comes over a link of 55 GB/s if the host has it, before that over one of 5 GB/s if not, one after
another, once what nobody leases has made room. A lease lasts as long as the request's answer. The
host's arena is a count of bytes, least recently used out.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from engine.benchmarks.random_adapters import random_layout
from engine.benchmarks.random_model import LLAMA_3_1_8B
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import LINEARS, BaseShape
from lorikeet_engine.kernels.lora import LoraWeights
from lorikeet_engine.popularity import (
    AZURE_CONV,
    RANKS,
    Floats,
    GammaArrivals,
    Ints,
    Zipf,
    choose_adapters,
    cut_to_context,
    deal_ranks,
)
from lorikeet_engine.residency.resident import Lease
from lorikeet_engine.residency.residents import Residents
from lorikeet_engine.residency.slots import SlotPool

SHAPE = BaseShape.from_config(LLAMA_3_1_8B)
ELEMENT_BYTES = 2
LINK_BYTES_PER_S, FAR_BYTES_PER_S = 55e9, 5e9
TOKEN_S, PROMPT_TOKENS_PER_S = 0.015, 25_000
HOST_SHARE = 0.25  # of all adapters' bytes
RESHUFFLE_S, NOISE_S = 300.0, 60.0


@dataclass(frozen=True, slots=True)
class Requests:
    """When each arrives, its adapter, how long its answer takes; [requests] each, by arrival."""

    times_s: Floats
    adapters: Ints
    holds_s: Floats


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who asks for what, and how much room there is.

    room: the GPU's, as a share of all adapters' bytes. noisy: during every second minute a tenant
    with a tenth of the adapters doubles the traffic and asks for each of them alike.
    """

    name: str
    popularity: Zipf
    adapters: int = 1000
    rate_per_s: float = 10.0
    cv: float = 1.0
    room: float = 0.1
    noisy: bool = False
    duration_s: float = 720.0

    def requests(self, seed: int = 1) -> Requests:
        """The same for the same seed."""
        rng = np.random.default_rng(seed)
        arrivals = GammaArrivals(self.rate_per_s, self.cv)
        times_s = arrivals.times(rng, self.duration_s)
        adapters = choose_adapters(
            self.popularity, self.adapters, times_s, seed=seed, reshuffle_s=RESHUFFLE_S
        )
        if self.noisy:
            noise_s = arrivals.times(rng, self.duration_s)
            noise_s = noise_s[noise_s // NOISE_S % 2 == 0]
            noise = rng.integers(0, self.adapters // 10, len(noise_s))
            order = np.argsort(np.concatenate([times_s, noise_s]), kind="stable")
            times_s = np.concatenate([times_s, noise_s])[order]
            adapters = np.concatenate([adapters, noise])[order]
        inputs, outputs = cut_to_context(*AZURE_CONV.draw(rng, len(times_s)), context=8192)
        holds_s = inputs / PROMPT_TOKENS_PER_S + outputs * TOKEN_S
        return Requests(times_s, adapters, holds_s)


class Link:
    """Carries one adapter after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def carry(self, elements: int, now_s: float) -> float:
        """When it is through."""
        begin_s = max(self._free_at_s, now_s)
        self._free_at_s = begin_s + elements * ELEMENT_BYTES / self._bytes_per_s
        return self._free_at_s


class Host:
    """The host's arena, counted in elements; the least recently used goes first."""

    def __init__(self, elements: float) -> None:
        self._free = elements
        self._images: OrderedDict[int, int] = OrderedDict()

    def use(self, adapter: int) -> bool:
        """Whether it is here."""
        if adapter not in self._images:
            return False
        self._images.move_to_end(adapter)
        return True

    def add(self, adapter: int, elements: int) -> None:
        """It has been fetched."""
        self._images[adapter] = elements
        self._free -= elements
        while self._free < 0:
            self._free += self._images.popitem(last=False)[1]


class Simulation:
    """One run of some traffic. make: (pool, transfer, clock, requests) → Residents.

    loads: when each began, and its elements. missed: the requests that did not find their adapter
    on the GPU. waits_s: of each request for its adapter.
    """

    def __init__(self, traffic: Traffic, make: Callable[..., Residents]) -> None:
        self.requests = requests = traffic.requests()
        self.loads: list[tuple[float, int]] = []
        self.missed: list[int] = []
        self.waits_s = np.zeros(len(requests.times_s))
        layouts = {rank: random_layout(SHAPE, rank) for rank in RANKS}
        self._layouts = [layouts[rank] for rank in deal_ranks(traffic.adapters).tolist()]
        total = sum(layout.elements for layout in self._layouts)
        pool = SlotPool(without_memory(int(total * traffic.room), traffic.adapters))
        self._now_s = 0.0
        self._residents = make(pool, self, lambda: self._now_s, requests)
        self._refs = [AdapterRef("t", str(i), 1, str(i)) for i in range(traffic.adapters)]
        self._host = Host(total * HOST_SHARE)
        self._link, self._far = Link(LINK_BYTES_PER_S), Link(FAR_BYTES_PER_S)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: dict[int, list[int]] = {}  # the requests that wait for each adapter
        self._line: list[int] = []  # adapters on the host that wait for room

    def run(self) -> None:
        """All requests, to their ends."""
        for request, at_s in enumerate(self.requests.times_s.tolist()):
            self._run_until(at_s)
            self._now_s = at_s
            self._arrive(request)
        self._run_until(math.inf)

    # What Residents asks of a Transfer.

    def copy(self, image: torch.Tensor, blocks: Sequence[torch.Tensor]) -> object:  # noqa: ARG002
        """The load begins; with an event, the adapter is not there until `arrived`."""
        return object()

    def reads(self) -> None:
        """No step is in flight when an adapter's lease ends."""

    def wait_for(self, _reads: None) -> None:
        """So there is nothing to wait for."""

    def moving(self) -> AbstractContextManager[None]:
        """Nothing is in flight at the moment of a move."""
        return nullcontext()

    def _run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self._now_s, _, act = heapq.heappop(self._events)
            act()

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def _arrive(self, request: int) -> None:
        adapter = int(self.requests.adapters[request])
        if self._lease(request, adapter):
            return
        self.missed.append(request)
        if adapter in self._waiting:
            self._waiting[adapter].append(request)
            return
        self._waiting[adapter] = [request]
        if self._host.use(adapter):
            self._queue(adapter)
        else:
            through_s = self._far.carry(self._layouts[adapter].elements, self._now_s)
            self._at(through_s, lambda: self._fetched(adapter))

    def _fetched(self, adapter: int) -> None:
        self._host.add(adapter, self._layouts[adapter].elements)
        self._queue(adapter)

    def _queue(self, adapter: int) -> None:
        self._line.append(adapter)
        self._admit()

    def _admit(self) -> None:
        refused = math.inf
        for adapter in list(self._line):
            elements = self._layouts[adapter].elements
            if elements >= refused:
                continue
            if self._residents.make_room(elements, insist=True):
                self._line.remove(adapter)
                self._place(adapter)
            else:
                refused = elements

    def _place(self, adapter: int) -> None:
        layout, image = self._layouts[adapter], torch.empty(0)
        self._residents.place(self._refs[adapter], layout, image, wanted=True)
        self.loads.append((self._now_s, layout.elements))
        self._at(self._link.carry(layout.elements, self._now_s), lambda: self._loaded(adapter))

    def _loaded(self, adapter: int) -> None:
        self._residents.arrived(str(adapter))
        for request in self._waiting.pop(adapter):
            assert self._lease(request, adapter)

    def _lease(self, request: int, adapter: int) -> bool:
        lease = self._residents.lease(str(adapter))
        if lease is None:
            return False
        self.waits_s[request] = self._now_s - self.requests.times_s[request]
        self._at(self._now_s + self.requests.holds_s[request], lambda: self._end(lease))
        return True

    def _end(self, lease: Lease) -> None:
        lease.release()
        if self._line:
            self._admit()


def without_memory(elements: int, slots: int) -> LoraWeights:
    """An arena that has a size and no memory, and a table that has both."""
    arena = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    return LoraWeights(arena, torch.zeros(slots, SHAPE.layers, len(LINEARS), 3, dtype=torch.int64))
