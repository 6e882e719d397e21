"""What routing and the simulator must reach on the real service, and whether they do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.paced_service.measure import RunNotes
from loadtest.paced_service.service import OURS
from loadtest.simulator.goals import HOT, Goal
from lorikeet.simulator.outcome import Outcome

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
            yield _less(mine, other, where, "cold loads ÷", _loads, _FEWER_LOADS[where])
        if other.router == "bounded hashing":
            yield _less(mine, other, where, "cold loads ÷", _loads, 1.0)
            yield _less(mine, other, where, "p99 TTFT ÷", _p99_s, 1.0)
        if other.router == "multiplexing" and where == HOT:
            yield _less(mine, other, where, "p99 TTFT ÷", _p99_s, 2.0)
            yield Goal(other.router, where, "max/mean load", mine.balance, most=1.25)


def _agreement(pair: RealAndSimulated) -> Iterator[Goal]:
    real, simulated = pair.real, pair.simulated
    for what, of in (("p50 TTFT off by", _p50_s), ("p99 TTFT off by", _p99_s)):
        off = abs(of(real) / of(simulated) - 1.0)
        yield Goal("simulator", pair.scenario, what, off, most=_CLOSE)


def _less(
    mine: Outcome,
    other: Outcome,
    where: str,
    what: str,
    of: Callable[[Outcome], float],
    least: float,
) -> Goal:
    return Goal(other.router, where, what, of(other) / of(mine), least=least)


def _loads(outcome: Outcome) -> float:
    return float(outcome.cold_loads)


def _p50_s(outcome: Outcome) -> float:
    return outcome.ttft_p50_s


def _p99_s(outcome: Outcome) -> float:
    return outcome.ttft_p99_s
