"""Counters by tenant or adapter: the busiest names have series of their own, the others share one.

A name's counter starts at 0 when the name is chosen. A name that loses its series to a busier one
is still shown for one round of ROUND_S seconds, so that a scrape sees its last uses, and then
dropped. Uses of a name while it is not chosen count as OTHER.

Every use therefore counts exactly once.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

TOKENS = ("prompt", "cached", "output")
"""Kinds of a finished request's tokens, in the order in which `BusiestNameCounters.count` takes
their numbers.
"""

OTHER = "other"

ROUND_S = 60.0
"""Seconds between two choices of names; longer than the interval between scrapes."""
_TAKEOVER_FACTOR = 2.0
"""Factor by which a name's uses must exceed another name's to take over its series.

Names with nearly equal uses therefore do not swap.
"""
_SHOWN_FACTOR = 1.25
"""Maximum number of names with a series in the metrics, as a multiple of `most`: a replaced name
keeps its series for one more round.
"""
_CANDIDATES = 10_000
"""Maximum number of names counted in a round that have no series of their own.

A name that first occurs after so many others is hardly among the busiest.
"""


class NamedCounter:
    """Counter whose first label is a name; all series of a name can be dropped at once."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._series: dict[str, dict[tuple[str, ...], int]] = {}

    def add(self, amount: int, name: str, *labels: str) -> None:
        """Add `amount` to a series.

        name: value of the first label.
        labels: values of the other labels.
        """
        series = self._series.setdefault(name, {})
        series[labels] = series.get(labels, 0) + amount

    def drop(self, name: str) -> None:
        """Drop all series of a name."""
        self._series.pop(name, None)

    def collect(self) -> CounterMetricFamily:
        """Return the counter with all its series."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for name, series in self._series.copy().items():
            for labels, value in series.copy().items():
                family.add_metric((name, *labels), value)
        return family


class BusiestNameCounters(Collector):
    """Requests and tokens of the busiest names. One thread may count; any may collect.

    requests: counter of requests.
    tokens: counter of tokens; its second label is their kind: prompt, cached or output (TOKENS).
    most: maximum number of names with series of their own.
    others: more counters by the same names, to which the caller adds.
    """

    def __init__(
        self, requests: NamedCounter, tokens: NamedCounter, most: int, *others: NamedCounter
    ) -> None:
        self._requests, self._tokens, self._others = requests, tokens, others
        self._names = BusiestNames(most, self._drop)

    def count(self, name: str, tokens: Sequence[int] | None, *labels: str) -> str:
        """Count an ended request; return the label of its name: the name or OTHER.

        tokens: numbers of prompt, cached and output tokens (TOKENS); None: unknown.
        labels: values of the request counter's labels after the name.
        """
        name = self._names.count(name)
        self._requests.add(1, name, *labels)
        if tokens is not None:
            for kind, amount in zip(TOKENS, tokens, strict=True):
                self._tokens.add(amount, name, kind)
        return name

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield all counters with their current values."""
        for counter in (self._requests, self._tokens, *self._others):
            yield counter.collect()

    def _drop(self, name: str) -> None:
        for counter in (self._requests, self._tokens, *self._others):
            counter.drop(name)


class BusiestNames:
    """Choice of up to `most` names to have series of their own. Single-threaded.

    The first names that occur are chosen at first. At the end of each round of ROUND_S seconds,
    clearly busier names replace the least busy of the chosen ones, and all counts of uses are
    halved.

    drop: called with each name whose series are to be removed.
    """

    def __init__(
        self,
        most: int,
        drop: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._drop, self._clock = most, drop, clock
        self._chosen: dict[str, float] = {}
        self._others: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._until_s = clock() + ROUND_S

    def count(self, name: str) -> str:
        """Count one use of a name; return the label for the use: the name if it is chosen, else
        OTHER.
        """
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
