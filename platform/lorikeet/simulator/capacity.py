"""Search for the smallest number of replicas that meets the goals, and for the pins that help."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lorikeet.errors import LorikeetError
from lorikeet.routing.ranking import capacity_per_s
from lorikeet.simulator.forecast import CapacityNeeds, Forecast, forecast
from lorikeet.simulator.traffic import Requests
from lorikeet.simulator.workload_models import Ints, cut_to_context
from lorikeet.sizes import show_size
from lorikeet_engine.costs import StepCosts

SEEDS = (1, 2, 3)
_ONE = SEEDS[:1]
_WARM = 0.99  # hit rate from which pins cannot change a p99
_MOST_COPIES = 2  # of a pinned adapter
_USUAL = 1.3  # where the search begins, as a multiple of the replicas that the work alone needs
# Where the search gives up: the larger of this multiple and this number of replicas.
_FURTHEST, _TRIED = 4, 32
_FEWEST_OF_TENANT = 5  # requests of a tenant, below which its p99 means nothing
_FEWEST = 20  # requests of one run
_DRAWN = 20_000  # prompts drawn to estimate their p99


class Unreachable(LorikeetError):
    """Error that no number of replicas meets the goals; the message says why."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Forecasts around the smallest number of replicas that meets the goals.

    needed: forecast for that number of replicas.
    unpinned: forecast for the same number of replicas without pins; None if `needed` has no pins.
    one_less: forecast for one replica fewer; None if one replica is enough.
    """

    needed: Forecast
    unpinned: Forecast | None
    one_less: Forecast | None


def plan_capacity(
    needs: CapacityNeeds, on_simulation: Callable[[int], None] = lambda _: None
) -> Capacity:
    """Find the smallest number of replicas that meets the goals, and the pins that help.

    on_simulation: called with the number of replicas before each simulation.

    A tenant's adapters are pinned if it would miss its own goal, more than 1% of its requests meet
    a cold adapter (one that is not on the GPU), and the pin lets it meet the goal.

    Raises Unreachable if no number of replicas meets the goals.
    """
    sample = needs.demand.requests(needs.counted_s, SEEDS[0])
    sample = needs.demand.without_system_prompts(sample)
    _check_feasible(needs, sample, len(SEEDS))
    return _Search(needs, on_simulation).run(_work(needs, sample))


def _work(needs: CapacityNeeds, sample: Requests) -> float:
    """Return the number of replicas, not rounded, that the demand's requests keep busy.

    The estimate assumes full batches and no adapters.

    sample: requests from which mean lengths are computed.
    """
    prompt, answer = float(sample.prompts.mean()), float(sample.answers.mean())
    return needs.demand.rate_per_s / capacity_per_s(needs.costs, prompt, answer, ranks=0)


@dataclass
class _Search:
    needs: CapacityNeeds
    on_simulation: Callable[[int], None]
    pins: dict[str, int] = field(default_factory=dict)  # tenant → copies, that have helped so far
    forecasts: dict[tuple[int, tuple[int, ...]], Forecast] = field(default_factory=dict)

    def run(self, work: float) -> Capacity:
        """Find the smallest number of replicas that meets the goals: by bisection with one seed,
        then with all seeds.

        work: number of replicas that the requests keep busy, as `_work` returns it.
        """
        most = max(_TRIED, math.ceil(_FURTHEST * work))
        enough = self._bisect(*self._bracket(work, most))
        while not self._forecast_with_pins(enough, SEEDS).met:
            if enough >= most:
                raise _unreachable(self._forecast_with_pins(enough, SEEDS))
            enough += 1
        while enough > 1 and self._forecast_with_pins(enough - 1, SEEDS).met:
            enough -= 1
        one_less = self._forecast_with_pins(enough - 1, SEEDS) if enough > 1 else None
        return self._drop_pins(Capacity(self._forecast_with_pins(enough, SEEDS), None, one_less))

    def _bracket(self, work: float, most: int) -> tuple[int, int]:
        """Return two numbers of replicas, with one seed: one that is too small, and one that is
        enough.

        work: number of replicas that the requests keep busy, from which the search starts.
        most: limit on the replicas to try.

        Raises Unreachable if `most` replicas are not enough.
        """
        too_few, enough = math.floor(work), math.ceil(_USUAL * work)
        while not self._forecast_with_pins(enough, _ONE).met:
            if enough == most:
                raise _unreachable(self._forecast_with_pins(most, _ONE))
            too_few, enough = enough, min(most, math.ceil(1.5 * enough))
        return too_few, enough

    def _bisect(self, too_few: int, enough: int) -> int:
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._forecast_with_pins(middle, _ONE).met:
                enough = middle
            else:
                too_few = middle
        return enough

    def _forecast_with_pins(self, replicas: int, seeds: tuple[int, ...]) -> Forecast:
        """Return the forecast for this number of replicas, with pins.

        Starts with the pins that helped in earlier forecasts. Then pins the adapters of further
        tenants, or more copies of them, while that may help.

        seeds: one simulation is run for each.
        """
        key = replicas, seeds
        if key not in self.forecasts:
            found = self._forecast(replicas, self.pins, seeds)
            while cold := [name for name in _cold(found) if found.pins.get(name, 0) < _MOST_COPIES]:
                more = {name: found.pins.get(name, 0) + 1 for name in cold}
                found = self._forecast(replicas, {**found.pins, **more}, seeds)
            if found.met:
                self.pins = dict(found.pins)
            self.forecasts[key] = found
        return self.forecasts[key]

    def _drop_pins(self, answer: Capacity) -> Capacity:
        """Return the answer without pins, or with one copy of each, if the goals are still met.

        An answer that keeps pins gets the forecast without them as `unpinned`.
        """
        needed = answer.needed
        if not needed.pins:
            return answer
        unpinned = self._forecast(needed.replicas, {}, SEEDS)
        if unpinned.met:
            return replace(answer, needed=unpinned)
        once = dict.fromkeys(needed.pins, 1)
        if once != needed.pins and (fewer := self._forecast(needed.replicas, once, SEEDS)).met:
            needed = fewer
        return replace(answer, needed=needed, unpinned=unpinned)

    def _forecast(self, replicas: int, pins: Mapping[str, int], seeds: tuple[int, ...]) -> Forecast:
        self.on_simulation(replicas)
        return forecast(self.needs, replicas, pins, seeds)


def _cold(found: Forecast) -> list[str]:
    """Return the tenants whose adapters should be pinned, or be pinned on one more replica; empty
    if pins alone cannot help.

    Pins may help if all missed goals belong to tenants that often meet a cold adapter (one that is
    not on the GPU), or that are pinned already and need more copies.
    """
    cold = [
        tenant
        for check in found.missed
        if (tenant := check.tenant) is not None
        and (tenant in found.pins or found.tenants[tenant].hit_rate < _WARM)
    ]
    return cold if found.keeps_up and len(cold) == len(found.missed) else []


def _check_feasible(needs: CapacityNeeds, sample: Requests, runs: int) -> None:
    """Raise Unreachable for goals that no number of replicas can meet.

    Such goals are those that even a single request on an idle GPU misses. Also refused are adapters
    larger than a GPU's memory for adapters, and too few requests to simulate.

    sample: requests whose prompts are checked against the goal for all requests.
    runs: number of simulations, each with another seed.
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
            "is enough"
        )
    if goals.ttft_p99_s is not None:
        _check_prompts("", goals.ttft_p99_s, sample.prompts, steps)
    for tenant in demand.tenants:
        if tenant.ttft_p99_s is None:
            continue
        if tenant.rate_per_s * needs.counted_s * runs < _FEWEST_OF_TENANT:
            raise Unreachable(
                f"{tenant.name} sends {tenant.rate_per_s * 3600:.1f} requests an hour beside "
                f"{demand.rate_per_s:,.0f} a second: too few are simulated to estimate its p99; "
                "join it with similar tenants, or give it no goal of its own"
            )
        drawn = tenant.lengths.draw(np.random.default_rng(0), _DRAWN)
        prompts, _ = cut_to_context(*drawn, demand.context)
        _check_prompts(f"{tenant.name}: ", tenant.ttft_p99_s, prompts, steps)
    step_s = steps.step_s(1, 0)
    for name, goal_s in (("p50", goals.inter_token_p50_s), ("p99", goals.inter_token_p99_s)):
        if goal_s is not None and goal_s < step_s:
            raise Unreachable(
                f"no number of replicas meets {name} ≤ {goal_s * 1e3:g} ms between tokens: a "
                f"sequence alone on a GPU gets a token every {step_s * 1e3:.1f} ms"
            )


def _unreachable(found: Forecast) -> Unreachable:
    """Make the error for the largest fleet that was tried: the goals it misses, and a remedy."""
    missed = "; ".join(check.text for check in found.missed)
    why = f"{found.replicas} replicas still miss: {missed}"
    if not found.keeps_up:
        why = f"with {found.replicas} replicas the queue grows without end"
    return Unreachable(
        f"no number of replicas meets the goals: {why}. {found.all.hit_rate:.1%} of the requests "
        f"find their adapter on the GPU, and their p99 to the first token is "
        f"{found.all.hit_p99_s * 1e3:,.0f} ms. Give adapters more memory, or relax the goal"
    )


def _check_prompts(whose: str, goal_s: float, prompts: Ints, steps: StepCosts) -> None:
    tokens = int(np.quantile(prompts, 0.99))
    if (alone_s := steps.prefill_s(tokens, 0)) > goal_s:
        raise Unreachable(
            f"{whose}no number of replicas meets p99 ≤ {goal_s * 1e3:g} ms to the first token: 1% "
            f"of the prompts have {tokens:,} tokens or more, which take {alone_s * 1e3:,.0f} ms "
            "alone on a GPU"
        )
