"""Metrics of pushed versions: how many, how large, and how soon they are ready and durable."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class PushMetrics:
    """What one gateway counts of pushes. For its event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._taken = Counter(
            "lorikeet_pushes_total",
            "Pushed versions that were checked and taken.",
            registry=registry,
        )
        self._bytes = Counter("lorikeet_pushed_bytes_total", "Their bytes.", registry=registry)
        self._ready = Histogram(
            "lorikeet_push_ready_seconds",
            "From the end of a pushed version's check until all replicas have it.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._durable = Histogram(
            "lorikeet_push_durable_seconds",
            "From the end of a pushed version's check until it is in the store.",
            buckets=_SECONDS,
            registry=registry,
        )

    def taken(self, size_bytes: int) -> None:
        """Count a version that was checked and taken."""
        self._taken.inc()
        self._bytes.inc(size_bytes)

    def ready(self, took_s: float) -> None:
        """Count a version that all replicas have."""
        self._ready.observe(took_s)

    def durable(self, took_s: float) -> None:
        """Count a version that is in the store."""
        self._durable.observe(took_s)
