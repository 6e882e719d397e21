"""Counters by tenant or adapter: the busiest names have series of their own, others share one.

A name's counter begins at nothing when the name is chosen. When another takes its place it is shown
for one more round, so that its last uses are seen, and then dropped; what the name does before and
after is counted as OTHER. So everything is counted once, where it happens; no counter goes down,
but for a name that comes back, which Prometheus takes for a restart; and the sum of all rates is
the rate of the whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

TOKENS = ("prompt", "cached", "output")
"""The kinds of tokens that a finished request has, in the order in which it says how many."""

OTHER = "other"

ROUND_S = 60.0
"""How often names can lose their places; scrapes come more often."""
_TAKEOVER_FACTOR = 2.0
"""How many times as busy a name must be to take another's place: near equals do not swap."""
_SHOWN_FACTOR = 1.25
"""The most names shown, in multiples of `most`: a quarter of them may have changed in a round."""
_CANDIDATES = 10_000
"""The most other names that are counted in a round; later ones are hardly the busiest."""


class NamedCounter:
    """A counter whose first label is a name that can be dropped with all its series.

    Plain numbers, collected several times as fast as prometheus_client's own children.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._series: dict[str, dict[tuple[str, ...], int]] = {}

    def add(self, amount: int, name: str, *labels: str) -> None:
        """Add to a series; labels: the values of the labels after the name."""
        series = self._series.setdefault(name, {})
        series[labels] = series.get(labels, 0) + amount

    def drop(self, name: str) -> None:
        """Drop all series of a name."""
        self._series.pop(name, None)

    def collect(self) -> CounterMetricFamily:
        """The counter with all its series."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for name, series in self._series.copy().items():
            for labels, value in series.copy().items():
                family.add_metric((name, *labels), value)
        return family


class BusiestNameCounters(Collector):
    """Requests and tokens of the busiest names. One thread counts; others may collect."""

    def __init__(self, requests: NamedCounter, tokens: NamedCounter, most: int) -> None:
        """tokens: its second label is of TOKENS. most: how many are named."""
        self._requests, self._tokens = requests, tokens
        self._names = BusiestNames(most, self._drop)

    def count(self, name: str, tokens: Sequence[int] | None, *labels: str) -> None:
        """Count a request that is over. labels: after the name. tokens: as TOKENS says."""
        name = self._names.count(name)
        self._requests.add(1, name, *labels)
        if tokens is not None:
            for kind, amount in zip(TOKENS, tokens, strict=True):
                self._tokens.add(amount, name, kind)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Both counters as they are now."""
        yield self._requests.collect()
        yield self._tokens.collect()

    def _drop(self, name: str) -> None:
        self._requests.drop(name)
        self._tokens.drop(name)


class BusiestNames:
    """Chooses `most` names: the first as they come, then by their uses. For one thread.

    A use counts half as much after each round.
    """

    def __init__(
        self,
        most: int,
        drop: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """drop: called with each name that is to be shown no more."""
        self._most, self._drop, self._clock = most, drop, clock
        self._chosen: dict[str, float] = {}
        self._others: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._until_s = clock() + ROUND_S

    def count(self, name: str) -> str:
        """Count a use of a name; return the label to count it under: the name, or OTHER."""
        if self._clock() >= self._until_s:
            self._until_s = self._clock() + ROUND_S
            self._choose()
        if name in self._chosen or len(self._chosen) < self._most:
            self._chosen[name] = self._chosen.get(name, 0.0) + 1.0
            return name
        if name in self._others or len(self._others) < _CANDIDATES:
            self._others[name] = self._others.get(name, 0.0) + 1.0
        return OTHER

    def _choose(self) -> None:
        left, self._leaving = self._leaving, set()
        challengers = sorted(self._others.items(), key=lambda item: -item[1])
        defenders = sorted(self._chosen.items(), key=lambda item: item[1])
        places = defenders[: max(1, int((_SHOWN_FACTOR - 1) * self._most))]
        for (name, uses), (chosen, its_uses) in zip(challengers, places, strict=False):
            if uses <= _TAKEOVER_FACTOR * its_uses:
                break
            del self._chosen[chosen], self._others[name]
            self._chosen[name] = uses
            self._leaving.add(chosen)
        for name in left - self._chosen.keys():
            self._drop(name)
        self._chosen = {name: uses / 2 for name, uses in self._chosen.items()}
        self._others = {name: uses / 2 for name, uses in self._others.items() if uses >= 2}
