"""Metrics in Prometheus's text format: each process writes its part, whoever is asked joins them.

https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4. A part is text already,
so to join those of a hundred processes is to copy them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_EXACT = 2**53


class Family(NamedTuple):
    """One metric's lines. head: HELP and TYPE, which stand once before the lines of all parts."""

    head: str
    lines: str


Page = Mapping[str, Family]
"""One process's metrics by name."""


def render(metrics: Iterable[Metric], labels: Mapping[str, str]) -> Page:
    """A process's part. labels: of all its samples, before their own."""
    common = [_label(*label) for label in labels.items()]
    page = {}
    for metric in metrics:
        lines = "".join(_line(sample, common) for sample in samples(metric))
        if lines:
            page[metric.name] = Family(_head(metric), lines)
    return page


def join(pages: Iterable[Page]) -> bytes:
    """The whole, one metric after the other."""
    heads: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for page in pages:
        for name, family in page.items():
            heads[name] = family.head
            lines.setdefault(name, []).append(family.lines)
    return "".join(heads[name] + "".join(lines[name]) for name in sorted(heads)).encode()


def samples(metric: Metric) -> Iterator[Sample]:
    """All but those that tell when counting began."""
    return (sample for sample in metric.samples if not sample.name.endswith("_created"))


def _head(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"# HELP {name} {metric.documentation}\n# TYPE {name} {metric.type}\n"


def _line(sample: Sample, common: list[str]) -> str:
    labels = ",".join([*common, *(_label(*label) for label in sample.labels.items())])
    braces = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{braces} {_number(sample.value)}\n"


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'


def _number(value: float) -> str:
    if abs(value) < _EXACT and value == int(value):
        return str(int(value))
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
