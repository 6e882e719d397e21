"""What a gateway measures: requests and their times, tenants, the busiest adapters."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from lorikeet.metrics.busiest import MORE
from lorikeet.metrics.ended import OUTCOMES, TOKENS, Ended
from lorikeet.metrics.names import NamedCounts

_TENANTS, _ADAPTERS = 1_000, 100
_TENANTS_OF_ALL = 2_000
"""A tenant takes 7 lines of some 90 bytes in each gateway's part of a page: 1.3 MB in all."""
_RAY_SERIES = 1_900
"""Of one metric, for a whole node: Ray's exporter throws together what is above 2,000."""

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_QUEUE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """Counts what one gateway does. `ended` belongs to its event loop; any thread may collect."""

    def __init__(self, gateways: int = 1) -> None:
        """gateways: how many share the room for names."""
        registry = self._registry = CollectorRegistry()
        model = ["base_model"]
        where = [*model, "residency"]
        self._requests = Counter(
            "lorikeet_requests_total",
            "Requests that are over, by what became of them.",
            [*model, "outcome"],
            registry=registry,
        )
        self._refusals = Counter(
            "lorikeet_refusals_total",
            "Requests that ended with an error, by its code.",
            [*model, "code"],
            registry=registry,
        )
        self._retries = Counter(
            "lorikeet_retries_total",
            "Attempts that a replica lost and another was given.",
            model,
            registry=registry,
        )
        self._first_token = Histogram(
            "lorikeet_ttft_seconds",
            "From a request's arrival to its first token.",
            where,
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._queue = Histogram(
            "lorikeet_queue_seconds",
            "How long a finished request waited in the engine for its turn, its adapter aside.",
            where,
            buckets=_QUEUE_S,
            registry=registry,
        )
        self._total = Histogram(
            "lorikeet_request_seconds",
            "From a finished request's arrival to its end.",
            where,
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._names = NamedCounts(
            tenants=min(_TENANTS, _TENANTS_OF_ALL // gateways), adapters=_ADAPTERS
        )
        few = _RAY_SERIES // gateways
        self._few_names = NamedCounts(
            tenants=min(_TENANTS, int(few / MORE / len(OUTCOMES))),
            adapters=min(_ADAPTERS, int(few / MORE / len(TOKENS))),
        )

    def serves(self, base_models: Iterable[str]) -> None:
        """Show these from now on, and not only once they are asked for."""
        for base_model in base_models:
            self._retries.labels(base_model)
            for outcome in OUTCOMES:
                self._requests.labels(base_model, outcome)

    def shows(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """A gauge; value: called when it is read, on any thread."""
        Gauge(name, documentation, registry=self._registry).set_function(value)

    def ended(self, request: Ended) -> None:
        """A request is over."""
        model = request.base_model
        self._requests.labels(model, request.outcome).inc()
        if request.code is not None:
            self._refusals.labels(model, request.code).inc()
        if request.retries:
            self._retries.labels(model).inc(request.retries)
        if request.residency is not None:
            self._took(request, model, request.residency)
        self._names.ended(request)
        self._few_names.ended(request)

    def collect(self) -> Iterator[Metric]:
        """All of it, as it is now."""
        return chain(self._registry.collect(), self._names.collect())

    def collect_for_ray(self) -> Iterator[Metric]:
        """The same with fewer names, as far as gateways of one node may have together."""
        return chain(self._registry.collect(), self._few_names.collect())

    def _took(self, request: Ended, model: str, residency: str) -> None:
        if request.first_token_s is not None:
            self._first_token.labels(model, residency).observe(request.first_token_s)
        if request.queue_s is not None:
            self._queue.labels(model, residency).observe(request.queue_s)
        if request.total_s is not None:
            self._total.labels(model, residency).observe(request.total_s)
