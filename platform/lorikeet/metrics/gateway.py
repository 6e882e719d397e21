"""What a gateway measures: requests and their times, tenants, the busiest adapters."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from lorikeet.metrics.busiest import Busiest
from lorikeet.metrics.many import ManyCounter

OUTCOMES = ("finished", "refused", "failed", "left")
TOKENS = ("prompt", "cached", "output")
NO_ADAPTER = "none"
"""The residency of a request to a base model."""

_TENANTS = 1_000
_TENANTS_OF_ALL = 2_000
"""A tenant takes 7 lines of some 90 bytes in each gateway's part of the page: 1.3 MB in all."""
_ADAPTERS = 100

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_QUEUE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Ended(NamedTuple):
    """A request that is over.

    tenant, base_model: "" where that was never known. adapter: tenant/name. residency: where its
    adapter was, NO_ADAPTER for a base model, None if no replica took it. code: of the error that
    ended it. first_token_s, queue_s, total_s: None where they say nothing. retries: replicas that
    lost it. tokens: as TOKENS says, of a finished one.
    """

    outcome: str
    tenant: str
    base_model: str
    adapter: str | None = None
    residency: str | None = None
    code: str | None = None
    first_token_s: float | None = None
    queue_s: float | None = None
    total_s: float | None = None
    retries: int = 0
    tokens: tuple[int, int, int] | None = None


class GatewayMetrics:
    """Counts what one gateway does. `ended` belongs to its event loop; any thread may collect."""

    def __init__(self, gateways: int = 1) -> None:
        """gateways: how many share the room that a page has for tenants."""
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
        self._tenant_requests = ManyCounter(
            "lorikeet_tenant_requests_total",
            "Requests of a tenant that are over, by what became of them.",
            ("tenant", "outcome"),
        )
        self._tenant_tokens = ManyCounter(
            "lorikeet_tenant_tokens_total",
            "Tokens of a tenant's finished requests; cached ones are among those of prompts.",
            ("tenant", "kind"),
        )
        self._adapter_requests = ManyCounter(
            "lorikeet_adapter_requests_total",
            "Requests of an adapter that are over; of all but the busiest together, as other.",
            ("adapter",),
        )
        self._adapter_tokens = ManyCounter(
            "lorikeet_adapter_tokens_total",
            "Tokens of an adapter's finished requests; cached ones are among those of prompts.",
            ("adapter", "kind"),
        )
        tenants = (self._tenant_requests, self._tenant_tokens)
        adapters = (self._adapter_requests, self._adapter_tokens)
        for counter in (*tenants, *adapters):
            registry.register(counter)
        most_tenants = max(1, min(_TENANTS, _TENANTS_OF_ALL // gateways))
        self._tenants = Busiest(most_tenants, _drop_from(*tenants))
        self._adapters = Busiest(_ADAPTERS, _drop_from(*adapters))

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
        if request.tenant:
            self._count_tenant(request)
        if request.adapter is not None:
            self._count_adapter(request, request.adapter)

    def collect(self) -> Iterable[Metric]:
        """All of it, as it is now."""
        return self._registry.collect()

    def _took(self, request: Ended, model: str, residency: str) -> None:
        if request.first_token_s is not None:
            self._first_token.labels(model, residency).observe(request.first_token_s)
        if request.queue_s is not None:
            self._queue.labels(model, residency).observe(request.queue_s)
        if request.total_s is not None:
            self._total.labels(model, residency).observe(request.total_s)

    def _count_tenant(self, request: Ended) -> None:
        tenant = self._tenants.used(request.tenant)
        self._tenant_requests.add(1, tenant, request.outcome)
        for kind, count in zip(TOKENS, request.tokens or (), strict=False):
            self._tenant_tokens.add(count, tenant, kind)

    def _count_adapter(self, request: Ended, name: str) -> None:
        adapter = self._adapters.used(name)
        self._adapter_requests.add(1, adapter)
        for kind, count in zip(TOKENS, request.tokens or (), strict=False):
            self._adapter_tokens.add(count, adapter, kind)


def _drop_from(*counters: ManyCounter) -> Callable[[str], None]:
    def drop(name: str) -> None:
        for counter in counters:
            counter.drop(name)

    return drop
