"""prometheus_client's families of samples, made of numbers that were counted elsewhere."""

from collections.abc import Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import Distribution


def gauge(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge for each value of one label."""
    return _with_values(GaugeMetricFamily(name, documentation, labels=[label]), values)


def counter(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter for each value of one label."""
    return _with_values(CounterMetricFamily(name, documentation, labels=[label]), values)


def histogram(
    name: str, documentation: str, label: str | None, values: Mapping[str, Distribution]
) -> Metric:
    """A histogram for each value of one label, once it has counted something.

    label: None where there is one distribution alone, whatever its key.
    """
    family = HistogramMetricFamily(name, documentation, labels=[label] if label else [])
    for value, distribution in values.items():
        if any(distribution.counts):
            family.add_metric([value] if label else [], _buckets(distribution), distribution.total)
    return family


def residency_label(found: Residency | None) -> str:
    """The label `residency` of a request whose adapter was at this tier; None: a base model."""
    return "none" if found is None else str(found)


def _with_values(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> Metric:
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Prometheus's buckets count what is at most their bound, those before them included."""
    bounds = [*map(floatToGoString, distribution.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
