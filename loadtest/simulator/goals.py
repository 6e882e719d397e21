"""What routing must reach against others, and whether it does."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from loadtest.simulator.oracle import ORACLE
from loadtest.simulator.outcome import Outcome
from loadtest.simulator.scenario import Scenario
from loadtest.simulator.trials import ALL_RESIDENT, Trial, table

EXPONENTS = (0.8, 1.0, 1.2, 1.5)
OURS = "lorikeet"
HASHING = "bounded hashing"
HASHING_OUR_EVICTION = "bounded hashing, our eviction"
_ROUTERS = (
    ORACLE,
    ALL_RESIDENT,
    OURS,
    HASHING,
    HASHING_OUR_EVICTION,
    "multiplexing",
    "power of two",
)

# The tiers that 10,000 adapters would find: 79 GB on a GPU, 157 on its host, 470 on its disk.
USUAL = Scenario(host_room=0.10, disk_room=0.30)
# One adapter has 40% of the traffic; the others share the rest.
HOT = "one adapter has 40%"

Outcomes = Mapping[str, Mapping[str, Outcome]]
"""scenario → router → outcome."""


def scenario_name(replicas: int, exponent: float) -> str:
    """The name of the scenario with N replicas and this popularity."""
    return f"{replicas} replicas, zipf {exponent}"


def scenarios(usual: Scenario = USUAL) -> dict[str, Scenario]:
    """All that the goals are about, by name."""
    named = {HOT: replace(usual, hot_share=0.4)}
    for exponent in EXPONENTS:
        zipf = replace(usual, popularity=f"zipf:{exponent}")
        named[scenario_name(16, exponent)] = zipf
        named[scenario_name(4, exponent)] = replace(zipf, replicas=4)
    return dict(sorted(named.items()))


def trials(usual: Scenario = USUAL) -> dict[tuple[str, str], Trial]:
    """Every router under every scenario."""
    return {
        (name, router): (scenario, router)
        for name, scenario in scenarios(usual).items()
        for router in _ROUTERS
    }


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that must be at least `least`, or at most `most`."""

    against: str
    where: str
    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        enough = self.least is None or self.value >= self.least
        return enough and (self.most is None or self.value <= self.most)

    @property
    def wanted(self) -> str:
        """What is wanted, in words."""
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"


def goals(outcomes: Outcomes) -> Iterator[Goal]:
    """Every goal, with what was measured."""
    for exponent in EXPONENTS:
        where = scenario_name(16, exponent)
        found = outcomes[where]
        if exponent >= 1.0:
            yield fewer_loads(found[OURS], found["power of two"], where, 5.0)
            yield sooner_first_tokens(found[OURS], found["power of two"], where, 3.0)
    for exponent in EXPONENTS:
        where = scenario_name(4, exponent)
        found, least = outcomes[where], 2.0 if exponent >= 1.2 else 1.5
        yield fewer_loads(found[OURS], found["power of two"], where, least)
    hot = outcomes[HOT]
    yield sooner_first_tokens(hot[OURS], hot["multiplexing"], HOT, 2.0)
    yield Goal("multiplexing", HOT, "max/mean load", hot[OURS].balance, most=1.25)
    where = scenario_name(16, 1.0)
    share = outcomes[where][OURS].hit_rate / outcomes[where][ORACLE].hit_rate
    yield Goal(ORACLE, where, "hit rate ÷", share, least=0.95)
    for replicas in (16, 4):
        for exponent in EXPONENTS:
            where = scenario_name(replicas, exponent)
            found = outcomes[where]
            for hashing in (HASHING, HASHING_OUR_EVICTION):
                yield fewer_loads(found[OURS], found[hashing], where, 1.0)
                yield sooner_first_tokens(found[OURS], found[hashing], where, 1.0)


def fewer_loads(ours: Outcome, other: Outcome, where: str, least: float) -> Goal:
    """The goal that another router has at least so many times our cold loads."""
    ratio = other.cold_loads / ours.cold_loads
    return Goal(other.router, where, "cold loads ÷", ratio, least=least)


def sooner_first_tokens(ours: Outcome, other: Outcome, where: str, least: float) -> Goal:
    """The goal that another router's p99 to the first token is at least so many times ours."""
    ratio = other.ttft_p99_s / ours.ttft_p99_s
    return Goal(other.router, where, "p99 TTFT ÷", ratio, least=least)


def goals_table(results: Iterable[Goal]) -> str:
    """Goals, and which of them are missed, as a table of Markdown."""
    rows = [
        (
            goal.against,
            goal.where,
            goal.what,
            goal.wanted,
            f"{goal.value:.2f}",
            "" if goal.met else "**missed**",
        )
        for goal in results
    ]
    return table(rows, ("against", "where", "what", "wanted", "measured", ""))
