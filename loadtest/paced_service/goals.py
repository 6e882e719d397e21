"""What routing and the simulator must reach on the real service, and whether they do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.paced_service.measure import RunNotes
from loadtest.simulator.goals import HOT, OURS, Goal, fewer_loads, sooner_first_tokens
from loadtest.simulator.outcome import Outcome

_CLOSE = 0.15
_FEWER_LOADS = {"zipf 0.8": 1.5, "zipf 1.0": 1.5, "zipf 1.2": 2.0, "zipf 1.5": 2.0}


@dataclass(frozen=True, slots=True)
class RealAndSimulated:
    """One run and its simulation, to which overhead_s is added that a request's way takes."""

    scenario: str
    real: Outcome
    simulated: Outcome
    overhead_s: float
    remarks: RunNotes


def goals(pairs: Sequence[RealAndSimulated]) -> Iterator[Goal]:
    """Every goal for which all runs are there, with what was measured."""
    for pair in pairs:
        if pair.real.router == OURS:
            yield from _agreement(pair)
    ours = {pair.scenario: pair.real for pair in pairs if pair.real.router == OURS}
    for pair in pairs:
        where, other = pair.scenario, pair.real
        if where not in ours or other.router == OURS:
            continue
        mine = ours[where]
        if other.router == "power of two" and where in _FEWER_LOADS:
            yield fewer_loads(mine, other, where, _FEWER_LOADS[where])
        if other.router == "bounded hashing":
            yield fewer_loads(mine, other, where, 1.0)
            yield sooner_first_tokens(mine, other, where, 1.0)
        if other.router == "multiplexing" and where == HOT:
            yield sooner_first_tokens(mine, other, where, 2.0)
            yield Goal(other.router, where, "max/mean load", mine.balance, most=1.25)


def _agreement(pair: RealAndSimulated) -> Iterator[Goal]:
    real, simulated = pair.real, pair.simulated
    ratios = {
        "p50 TTFT off by": real.ttft_p50_s / simulated.ttft_p50_s,
        "p99 TTFT off by": real.ttft_p99_s / simulated.ttft_p99_s,
    }
    for what, ratio in ratios.items():
        yield Goal("simulator", pair.scenario, what, abs(ratio - 1.0), most=_CLOSE)
