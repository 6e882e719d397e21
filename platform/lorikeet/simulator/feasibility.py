"""Goals that no number of replicas can meet, found before any is simulated."""

import numpy as np

from lorikeet.errors import LorikeetError
from lorikeet.simulator.forecast import CapacityNeeds, Forecast
from lorikeet.simulator.traffic import Requests
from lorikeet.sizes import show_size
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.traffic import Ints, cut_to_context

_FEWEST_OF_TENANT = 5  # requests of a tenant below which its p99 says nothing
_FEWEST = 20  # requests of one run
_DRAWN = 20_000  # prompts, to tell the longest in a hundred


class Unreachable(LorikeetError):
    """No number of replicas meets the goals; the message says why."""


def check_feasible(needs: CapacityNeeds, sample: Requests, runs: int) -> None:
    """Check for goals that one request alone on a GPU would miss, and adapters that fit nowhere.

    sample: the requests of one of `runs` simulations. Raises Unreachable.
    """
    demand, goals, steps = needs.demand, needs.goals, needs.costs.steps
    largest = int(demand.sizes.max())
    if largest > needs.memory.gpu_bytes:
        raise Unreachable(
            f"an adapter of {show_size(largest)} does not fit in the "
            f"{show_size(needs.memory.gpu_bytes)} that a GPU has for adapters: give it more"
        )
    if demand.rate_per_s * needs.counted_s < _FEWEST:
        raise Unreachable(
            f"{demand.rate_per_s * 3600:.1f} requests an hour are too few to simulate: one replica "
            "will do"
        )
    if goals.ttft_p99_s is not None:
        _check_prompts("", goals.ttft_p99_s, sample.prompts, steps)
    for tenant in demand.tenants:
        if tenant.ttft_p99_s is None:
            continue
        if tenant.rate_per_s * needs.counted_s * runs < _FEWEST_OF_TENANT:
            raise Unreachable(
                f"{tenant.name} sends {tenant.rate_per_s * 3600:.1f} requests an hour beside "
                f"{demand.rate_per_s:,.0f} a second: too few are simulated to tell its tail; take "
                "it together with tenants like it, or give it no goal of its own"
            )
        drawn = tenant.lengths.draw(np.random.default_rng(0), _DRAWN)
        prompts, _ = cut_to_context(*drawn, demand.context)
        _check_prompts(f"{tenant.name}: ", tenant.ttft_p99_s, prompts, steps)
    step_s = steps.step_s(1, 0)
    for name, goal_s in (("p50", goals.inter_token_p50_s), ("p99", goals.inter_token_p99_s)):
        if goal_s is not None and goal_s < step_s:
            raise Unreachable(
                f"no number of replicas meets {name} ≤ {goal_s * 1e3:g} ms between tokens: a "
                f"sequence alone on a GPU gets one every {step_s * 1e3:.1f} ms"
            )


def unreachable(found: Forecast) -> Unreachable:
    """The error for the largest fleet that was tried: what it misses, and a remedy."""
    missed = "; ".join(check.text for check in found.missed)
    why = f"{found.replicas} replicas still miss: {missed}"
    if not found.keeps_up:
        why = f"with {found.replicas} replicas requests wait longer and longer"
    return Unreachable(
        f"no number of replicas meets the goals. {why}. {found.all.hit_rate:.1%} of the requests "
        f"find their adapter on the GPU, and of those p99 to the first token is "
        f"{found.all.hit_p99_s * 1e3:,.0f} ms: give adapters more memory, or relax the goal"
    )


def _check_prompts(whose: str, goal_s: float, prompts: Ints, steps: StepCosts) -> None:
    tokens = int(np.quantile(prompts, 0.99))
    if (alone_s := steps.prefill_s(tokens, 0)) > goal_s:
        raise Unreachable(
            f"{whose}no number of replicas meets p99 ≤ {goal_s * 1e3:g} ms to the first token: one "
            f"prompt in a hundred has {tokens:,} tokens or more, and alone on a GPU takes "
            f"{alone_s * 1e3:,.0f} ms"
        )
