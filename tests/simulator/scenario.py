"""Simulated fleet and its traffic, described by sizes and shares. Adapters follow Zipf's law."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lorikeet.routing.ranking import H200_LLAMA_8B, CostCoefficients, capacity_per_s
from lorikeet.simulator.traffic import BASE_MODEL, BYTES_PER_RANK, FleetSetup, Requests
from lorikeet.simulator.workload_models import (
    AZURE_CONV,
    Ints,
    LengthModel,
    Zipf,
    choose_adapters,
    cut_to_context,
    deal_ranks,
    poisson,
)


@dataclass(frozen=True)
class Scenario:
    """Traffic, and the fleet that serves it. Other fields are described in FleetSetup.

    load: requests per second, as a share of what all replicas could answer with full batches.
    rate_per_s: requests per second; overrides `load`.
    gpu_room, host_room, disk_room: memory of each replica, as shares of all adapters' bytes; each
        disk begins full of random adapters.
    hot_share: share of requests for one adapter.
    base_share: share of requests for the base model.
    """

    adapters: int = 1000
    replicas: int = 16
    load: float = 0.7
    rate_per_s: float | None = None
    lengths: LengthModel = AZURE_CONV
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
    costs: CostCoefficients = H200_LLAMA_8B

    @cached_property
    def ranks(self) -> Ints:
        """Rank of each adapter, [adapters]."""
        return deal_ranks(self.adapters)

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each adapter, [adapters]."""
        return self.ranks * BYTES_PER_RANK

    @cached_property
    def rate(self) -> float:
        """Requests per second of the whole fleet."""
        if self.rate_per_s is not None:
            return self.rate_per_s
        rng = np.random.default_rng(0)
        prompts, answers = cut_to_context(*self.lengths.draw(rng, 100_000), self.context)
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
        times_s = poisson(self.rate).times(rng, self.duration_s)
        lengths = self.lengths.draw(rng, len(times_s))
        adapters = choose_adapters(
            Zipf(1.0),
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
