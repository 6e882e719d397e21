"""Simulated fleet and its traffic, described by sizes and shares."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lorikeet.routing.ranking import H200_LLAMA_8B, CostCoefficients, capacity_per_s
from lorikeet.simulator.traffic import BASE_MODEL, BYTES_PER_RANK, FleetSetup, Requests
from lorikeet.simulator.workload_models import (
    LENGTH_MODELS,
    GammaArrivals,
    Ints,
    LengthModel,
    TrafficTrace,
    choose_adapters,
    cut_to_context,
    deal_ranks,
    parse_popularity,
)


@dataclass(frozen=True)
class Scenario:
    """Traffic, and the fleet that serves it. Other fields are described in FleetSetup.

    popularity: text for `parse_popularity`.
    load: requests per second, as a share of what all replicas could answer with full batches.
    rate_per_s: requests per second; overrides `load`.
    cv: coefficient of variation of the gaps between arrivals.
    trace: file for `TrafficTrace.read`; replaces drawn arrivals and lengths.
    lengths: a name in LENGTH_MODELS, or a model.
    gpu_room, host_room, disk_room: memory of each replica, as shares of all adapters' bytes; each
        disk begins full of random adapters.
    hot_share: share of requests for one adapter.
    base_share: share of requests for the base model.
    """

    adapters: int = 1000
    replicas: int = 16
    popularity: str = "zipf:1.0"
    load: float = 0.7
    rate_per_s: float | None = None
    cv: float = 1.0
    trace: Path | None = None
    lengths: str | LengthModel = "conv"
    context: int = 8192
    gpu_room: float = 0.05
    host_room: float = 0.25
    disk_room: float = 1.0
    hot_share: float = 0.0
    base_share: float = 0.0
    reshuffle_s: float = 300.0
    duration_s: float = 720.0
    warm_up_s: float = 120.0
    gateways: int = 4
    status_age_s: float = 0.15
    seed: int = 1
    bytes_per_rank: int = BYTES_PER_RANK
    costs: CostCoefficients = H200_LLAMA_8B

    @cached_property
    def ranks(self) -> Ints:
        """Rank of each adapter, [adapters]."""
        return deal_ranks(self.adapters)

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each adapter, [adapters]."""
        return self.ranks * self.bytes_per_rank

    @cached_property
    def rate(self) -> float:
        """Requests per second of the whole fleet."""
        if self.rate_per_s is not None:
            return self.rate_per_s
        rng = np.random.default_rng(0)
        prompts, answers = cut_to_context(*self._draw_lengths(rng, 100_000), self.context)
        # The ranks of a step are at most those that fit on the GPU.
        ranks = min(int(self.ranks.sum() * self.gpu_room), 128 * int(self.ranks.mean()))
        per_replica = capacity_per_s(
            self.costs, float(prompts.mean()), float(answers.mean()), ranks
        )
        return self.load * per_replica * self.replicas

    def setup(self) -> FleetSetup:
        """Return the setup of this fleet and its adapters."""
        total = int(self.sizes.sum())
        return FleetSetup(
            replicas=self.replicas,
            ranks=self.ranks,
            sizes=self.sizes,
            gpu_bytes=int(total * self.gpu_room),
            host_bytes=int(total * self.host_room),
            disk_bytes=int(total * self.disk_room),
            gateways=self.gateways,
            status_age_s=self.status_age_s,
            warm_up_s=self.warm_up_s,
            seed=self.seed,
            costs=self.costs,
        )

    def requests(self) -> Requests:
        """Draw the requests; equal scenarios give equal requests."""
        rng = np.random.default_rng(self.seed)
        if self.trace is None:
            times_s = GammaArrivals(self.rate, self.cv).times(rng, self.duration_s)
            lengths = self._draw_lengths(rng, len(times_s))
        else:
            recorded = TrafficTrace.read(self.trace).at_rate(self.rate)
            recorded = recorded.until(self.duration_s)
            times_s, lengths = recorded.times_s, (recorded.inputs, recorded.outputs)
        adapters = choose_adapters(
            parse_popularity(self.popularity),
            self.adapters,
            times_s,
            seed=self.seed,
            reshuffle_s=self.reshuffle_s,
        )
        dice = rng.random(len(times_s))
        adapters[dice < self.hot_share] = 0
        adapters[dice >= 1.0 - self.base_share] = BASE_MODEL
        prompts, answers = cut_to_context(*lengths, self.context)
        return Requests(times_s, adapters, prompts, answers)

    def _draw_lengths(self, rng: np.random.Generator, requests: int) -> tuple[Ints, Ints]:
        model = LENGTH_MODELS[self.lengths] if isinstance(self.lengths, str) else self.lengths
        return model.draw(rng, requests)
