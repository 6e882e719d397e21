"""Outcome of a simulation: hits, loads, times and balance."""

import math
from dataclasses import dataclass

import numpy as np

from lorikeet.simulator.fleet import SimulatedFleet


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numbers of the requests after the warm-up. The oracle has no times and no balance.

    hit_rate: share of requests that found the adapter on the GPU, or needed none.
    cold_loads: loads to GPUs.
    loaded_gb: gigabytes of these loads.
    ttft_p50_s, ttft_p99_s: time to first token.
    balance: work of the busiest replica over the mean; work is the time of prompts and tokens in a
        full batch.
    balance_worst_minute: largest `balance` of any whole minute.
    """

    router: str
    requests: int
    hit_rate: float
    cold_loads: int
    loaded_gb: float
    ttft_p50_s: float = math.nan
    ttft_p99_s: float = math.nan
    balance: float = math.nan
    balance_worst_minute: float = math.nan


def summarize(router: str, fleet: SimulatedFleet) -> Outcome:
    """Summarise a fleet that has run."""
    warm_up_s, times_s = fleet.setup.warm_up_s, fleet.requests.times_s
    counted = times_s >= warm_up_s
    p50_s, p99_s = np.quantile(fleet.ttft_s[counted], [0.5, 0.99])
    loads = [size for at_s, size in fleet.loads if at_s >= warm_up_s]
    minutes = times_s // 60.0
    whole = [counted & (minutes == minute) for minute in np.unique(minutes[counted])]
    return Outcome(
        router,
        requests=int(counted.sum()),
        hit_rate=float(fleet.hits[counted].mean()),
        cold_loads=len(loads),
        loaded_gb=sum(loads) / 1e9,
        ttft_p50_s=float(p50_s),
        ttft_p99_s=float(p99_s),
        balance=_balance(fleet, counted),
        balance_worst_minute=max(_balance(fleet, minute) for minute in whole),
    )


def _balance(fleet: SimulatedFleet, counted: np.ndarray) -> float:
    steps, requests = fleet.setup.costs.steps, fleet.requests
    prompts, answers = requests.prompts[counted], requests.answers[counted]
    context = steps.max_running * steps.decode_sees(prompts.mean() + answers.mean() / 2)
    token_s = steps.step_s(steps.max_running, 0, context) / steps.max_running
    seen = prompts**2 / 2
    work_s = steps.prompt_token_s * prompts + steps.prompt_seen_s * seen + token_s * answers
    of_replica = np.bincount(fleet.served_by[counted], work_s, len(fleet.replicas))
    return float(of_replica.max() / of_replica.mean())
