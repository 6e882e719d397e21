"""Builders of prometheus_client's metric families from numbers that were counted elsewhere."""

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
    """Return a gauge with one label.

    name, documentation: name and help text in Prometheus.
    label: name of the label.
    values: values of the gauge by value of the label.
    """
    return _with_values(GaugeMetricFamily(name, documentation, labels=[label]), values)


def counter(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with one label.

    name, documentation: name and help text in Prometheus.
    label: name of the label.
    values: values of the counter by value of the label.
    """
    return _with_values(CounterMetricFamily(name, documentation, labels=[label]), values)


def histogram(
    name: str, documentation: str, label: str | None, values: Mapping[str, Distribution]
) -> Metric:
    """Return a histogram with one label or none, without distributions that are empty.

    name, documentation: name and help text of the metric.
    label: name of the label; None for a single distribution, whose key in `values` is ignored.
    values: distributions by value of the label.
    """
    family = HistogramMetricFamily(name, documentation, labels=[label] if label else [])
    for value, distribution in values.items():
        if any(distribution.counts):
            family.add_metric([value] if label else [], _buckets(distribution), distribution.total)
    return family


def residency_label(found: Residency | None) -> str:
    """Return the value of the label `residency`.

    found: tier of the request's adapter on arrival; None: a request to the base model.
    """
    return "none" if found is None else str(found)


def _with_values(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> Metric:
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return cumulative buckets (bound, count), as Prometheus expects them."""
    bounds = [*map(floatToGoString, distribution.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
