"""What a process measures, through Ray's own exporter: gauges that are set every few seconds.

Ray names them ray_lorikeet_…, and adds labels of its own. A histogram's buckets, sum and count are
gauges too, `le` among their labels: Ray's histograms cannot be set to what was counted elsewhere.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from prometheus_client.core import Metric
from ray.util.metrics import Gauge

from lorikeet.metrics.page import samples

log = logging.getLogger(__name__)

EXPORT_S = 5.0


class RayExporter:
    """Sets Ray's gauges to what a process measures. For one thread at a time."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """labels: of all the process's samples."""
        self._labels = dict(labels)
        self._gauges: dict[str, Gauge] = {}

    def export(self, metrics: Iterable[Metric]) -> None:
        """All samples, as they are now."""
        for metric in metrics:
            for sample in samples(metric):
                labels = self._labels | sample.labels
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = Gauge(sample.name, metric.documentation, tuple(labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, labels)


async def export_forever(
    measure: Callable[[], Awaitable[Iterable[Metric]]], labels: Mapping[str, str]
) -> None:
    """Every EXPORT_S, until cancelled; off the event loop, but for `measure`."""
    exporter, failure = RayExporter(labels), ""
    while True:
        try:
            await asyncio.to_thread(exporter.export, await measure())
        except Exception as error:  # nothing depends on it
            if repr(error) != failure:
                log.warning("metrics_not_exported", extra={"error": repr(error)})
            failure = repr(error)
        else:
            failure = ""
        await asyncio.sleep(EXPORT_S)
