"""Demand on a fleet: tenants with their adapters and rates, from which requests are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lorikeet.simulator.drafting import NO_DRAFTS, Drafting
from lorikeet.simulator.traffic import BASE_MODEL, Requests
from lorikeet.simulator.workload_models import (
    GammaArrivals,
    Ints,
    LengthModel,
    cut_to_context,
    deal_ranks,
    parse_popularity,
)


@dataclass(frozen=True, slots=True)
class SimulatedTenant:
    """A tenant with similar adapters.

    adapters: number of adapters.
    ranks: LoRA ranks, dealt to the adapters in turn.
    bytes_per_rank: bytes of an adapter's weights on the GPU for each unit of rank.
    popularity: distribution of requests among the adapters: distinct, uniform, identical, or
        zipf:S with exponent S.
    rate_per_s: requests per second for all adapters together.
    lengths: lengths of prompts and answers.
    ttft_p99_s: the tenant's own goal for the p99 of the time to first token; None: no goal.
    system_tokens: tokens of each adapter's own system prompt, with which all its prompts begin,
        before those of `lengths`.
    """

    name: str
    adapters: int
    ranks: tuple[int, ...]
    bytes_per_rank: int
    popularity: str
    rate_per_s: float
    lengths: LengthModel
    ttft_p99_s: float | None = None
    system_tokens: int = 0


@dataclass(frozen=True)
class SimulatedDemand:
    """All traffic of a simulated fleet. Adapters are numbered across tenants, in the tenants'
    order.

    base_lengths, base_rate_per_s: lengths and rate of the requests without an adapter.
    cv: coefficient of variation of the gaps between requests.
    context: limit on the tokens of a prompt with its answer.
    drafting: drafts of the answers' tokens; by default none come true.
    """

    tenants: Sequence[SimulatedTenant]
    base_lengths: LengthModel
    base_rate_per_s: float = 0.0
    cv: float = 1.0
    context: int = 8192
    drafting: Drafting = NO_DRAFTS

    @property
    def rate_per_s(self) -> float:
        """Requests per second of all tenants and the base model."""
        return self.base_rate_per_s + sum(tenant.rate_per_s for tenant in self.tenants)

    @cached_property
    def ranks(self) -> Ints:
        """Rank of each adapter, [adapters]."""
        return np.concatenate([deal_ranks(each.adapters, each.ranks) for each in self.tenants])

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each adapter, [adapters]."""
        dealt = [deal_ranks(one.adapters, one.ranks) * one.bytes_per_rank for one in self.tenants]
        return np.concatenate(dealt)

    @cached_property
    def tenant_of(self) -> Ints:
        """Index of each adapter's tenant, [adapters]."""
        return np.repeat(np.arange(len(self.tenants)), [one.adapters for one in self.tenants])

    @cached_property
    def system_tokens(self) -> Ints:
        """Tokens of each adapter's system prompt, [adapters]."""
        each = [one.system_tokens for one in self.tenants]
        return np.repeat(each, [one.adapters for one in self.tenants])

    def without_system_prompts(self, requests: Requests) -> Requests:
        """Return requests as if all system prompts were cached."""
        adapters, prompts = requests.adapters, requests.prompts
        cached = np.where(adapters == BASE_MODEL, 0, self.system_tokens[adapters])
        return replace(requests, prompts=prompts - np.minimum(cached, prompts - 1))

    def requests(self, duration_s: float, seed: int) -> Requests:
        """Draw the requests that arrive in duration_s seconds; equal seeds give equal requests."""
        rng = np.random.default_rng(seed)
        times_s = GammaArrivals(self.rate_per_s, self.cv).times(rng, duration_s)
        rates = np.array([self.base_rate_per_s, *(one.rate_per_s for one in self.tenants)])
        asking = rng.choice(len(rates), size=len(times_s), p=rates / rates.sum()) - 1
        prompts, answers = self.base_lengths.draw(rng, len(times_s))
        adapters, first = np.full(len(times_s), BASE_MODEL), 0
        for number, tenant in enumerate(self.tenants):
            own = asking == number
            popularity, asked = parse_popularity(tenant.popularity), int(own.sum())
            adapters[own] = first + popularity.draw(rng, tenant.adapters, asked)
            prompts[own], answers[own] = tenant.lengths.draw(rng, asked)
            prompts[own] += tenant.system_tokens
            first += tenant.adapters
        return Requests(times_s, adapters, *cut_to_context(prompts, answers, self.context))
