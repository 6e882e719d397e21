"""Prometheus's text format: rendering of one process's part, and joining of all parts to a page.

A part is a complete page in Prometheus's text format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats).
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_HELP = b"\n# HELP "


def render(metrics: Iterable[Metric], labels: Mapping[str, str]) -> bytes:
    """Return one process's part of the metrics page.

    metrics: modified in place, so collect them again for each call.
    labels: names and values of the process's labels, added to every sample.
    """
    return generate_latest(_Labelled(metrics, labels))


def join(parts: Iterable[bytes]) -> bytes:
    """Return the page that joins `parts`, with all samples of a metric under one header."""
    heads: dict[bytes, bytes] = {}
    samples: dict[bytes, list[bytes]] = {}
    for part in parts:
        for family in (b"\n" + part[:-1]).split(_HELP)[1:]:
            help_line, kind, lines = family.split(b"\n", 2)
            name = help_line.split(b" ", 1)[0]
            heads[name] = b"\n".join((help_line, kind))
            samples.setdefault(name, []).append(lines)
    families = (b"\n".join((heads[name], *samples[name])) for name in sorted(heads))
    return b"".join(b"# HELP " + family + b"\n" for family in families)


class _Labelled(Collector):
    """Metrics with a process's labels added, without `_created` samples."""

    def __init__(self, metrics: Iterable[Metric], labels: Mapping[str, str]) -> None:
        self._metrics, self._labels = metrics, labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            samples = [each for each in metric.samples if not each.name.endswith("_created")]
            for sample in samples:
                sample.labels.update(self._labels)
            metric.samples = samples
            if samples:
                yield metric
