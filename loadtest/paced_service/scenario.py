"""The goals' traffic, on a fleet that two CPU cores can stand for.

Everything takes some three times as long as on GPUs, prompts and answers have a fortieth of their
tokens, and each token takes so much longer. So there are few steps, tokens and requests a second,
and the work behind them is small beside what they are made to take.
"""

import math
from dataclasses import asdict, replace

import torch

from loadtest.real_service.adapters import AdapterWeights
from loadtest.simulator.goals import HOT
from loadtest.simulator.scenario import Scenario
from lorikeet.routing.ranking import CostCoefficients
from lorikeet_engine.costs import LoadCosts, RowsTime, StepCosts
from lorikeet_engine.traffic import AZURE_CONV, LengthModel

WEIGHTS = AdapterWeights(linears=("q_proj",), layers=1, dtype=torch.float32)
"""The adapters' weights for the demo's model."""
_BYTES_PER_RANK = (256 + 256) * 4  # of such an adapter's image
_SHORTER = 40
_STEPS = StepCosts(
    rows=(RowsTime(1, 40e-3), RowsTime(32, 60e-3), RowsTime(64, 180e-3)),
    seen_token_s=4e-6,
    prompt_seen_s=7e-6,
    pieces_s=0.0,
    split_s=0.0,
    lora_s=2e-3,
    rank_s=6e-6,
    lora_token_s=0.15e-3,
    step_tokens=64,
    max_running=32,
)
# Downloads are paced; the others are what such small adapters take here.
_LOADS = LoadCosts(
    host_latency_s=2e-3,
    host_bytes_per_s=1e9,
    disk_latency_s=8e-3,
    disk_bytes_per_s=100e6,
    remote_latency_s=0.3,
    remote_bytes_per_s=1e6,
)
COSTS = CostCoefficients(
    _STEPS, _LOADS, answer_tokens=220.0 / _SHORTER, copy_s=0.5, evicted_use_s=0.08
)
"""Prices in seconds are as many times higher as seconds are cheaper."""

USUAL = Scenario(
    adapters=1000,
    replicas=4,
    lengths=LengthModel(
        AZURE_CONV.input_mu - math.log(_SHORTER),
        AZURE_CONV.input_sigma,
        AZURE_CONV.output_mu - math.log(_SHORTER),
        AZURE_CONV.output_sigma,
    ),
    context=8192 // _SHORTER,
    host_room=0.10,
    disk_room=0.30,
    gateways=1,
    bytes_per_rank=_BYTES_PER_RANK,
    costs=COSTS,
)


def slowed(scenario: Scenario, factor: float) -> Scenario:
    """The scenario in slow motion, for a machine that has less to spare."""
    costs = scenario.costs
    steps, loads = asdict(costs.steps), asdict(costs.loads)
    seconds = {name: factor * value for name, value in steps.items() if name.endswith("_s")}
    rows = tuple(RowsTime(tokens, factor * taken_s) for tokens, taken_s in costs.steps.rows)
    times = {
        name: value / factor if name.endswith("_per_s") else factor * value
        for name, value in loads.items()
    }
    slow = replace(
        costs,
        steps=replace(costs.steps, rows=rows, **seconds),
        loads=LoadCosts(**times),
        copy_s=factor * costs.copy_s,
        evicted_use_s=factor * costs.evicted_use_s,
    )
    return replace(scenario, costs=slow)


def lasting(scenario: Scenario, seconds: float) -> Scenario:
    """The scenario for `seconds`, with one change of who is popular; a fifth is not counted."""
    return replace(
        scenario,
        duration_s=seconds,
        reshuffle_s=0.6 * seconds,
        warm_up_s=0.2 * seconds,
        rate_per_s=scenario.rate,
    )


SCENARIOS = {
    **{f"zipf {s}": replace(USUAL, popularity=f"zipf:{s}") for s in (0.8, 1.0, 1.2, 1.5)},
    HOT: replace(USUAL, hot_share=0.4),
}
