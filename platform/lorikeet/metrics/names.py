"""Counters by names: of a hundred thousand, so many as one shows."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class ManyCounter(Collector):
    """A counter whose first label is a name that can be dropped with all its series.

    Plain numbers, collected several times as fast as prometheus_client's own children. One thread
    counts; others may collect.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._series: dict[str, dict[tuple[str, ...], int]] = {}

    def add(self, amount: int, name: str, *labels: str) -> None:
        """Count; labels: the values of those after the name's."""
        series = self._series.setdefault(name, {})
        series[labels] = series.get(labels, 0) + amount

    def drop(self, name: str) -> None:
        """Show it no more."""
        self._series.pop(name, None)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One family, for a registry."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for name, series in self._series.copy().items():
            for labels, value in series.copy().items():
                family.add_metric((name, *labels), value)
        yield family
