"""Counters by tenant or adapter: the busiest names have series of their own, others share one."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from lorikeet.metrics.label_cardinality import BusiestNames

TOKENS = ("prompt", "cached", "output")
"""The kinds of tokens that a finished request has, in the order in which it says how many."""


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
