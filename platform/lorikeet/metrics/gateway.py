"""Metrics of a gateway: requests and latencies, tenants, busiest adapters, pushes."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from lorikeet.metrics.metric_builders import residency_label
from lorikeet.metrics.named_counters import BusiestNameCounters, NamedCounter
from lorikeet.parity.figures import Parity
from lorikeet.protocol.messages import ResumeReason
from lorikeet.request_log.record import RequestRecord

OUTCOMES = ("finished", "refused", "failed", "cancelled")

_TENANTS, _ADAPTERS = 1_000, 100
"""Maximum numbers of tenants and of adapters that have series of their own in one gateway."""
_TENANTS_OF_ALL = 2_000
"""Maximum number of tenants with series of their own, in all gateways together.

A tenant's 7 lines have about 90 bytes each, so the tenants take 1.3 MB of the page.
"""

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_QUEUE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PUSH_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PARITY_NATS = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class GatewayMetrics:
    """Metrics of one gateway. Call `count` on the event loop, `collect` on any thread.

    gateways: number of gateways. Each shows its share of the 2,000 tenants that may have series of
        their own in all gateways together.
    """

    def __init__(self, gateways: int = 1) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "lorikeet_requests_total", "Ended requests, by outcome.", "outcome"
        )
        self._errors = self._counter(
            "lorikeet_request_errors_total",
            "Requests that ended with an error, by error code.",
            "code",
        )
        self._retries = self._counter(
            "lorikeet_request_retries_total", "Attempts that a replica lost and another took over."
        )
        self._resumes = self._counter(
            "lorikeet_request_resumes_total",
            "Answers that another replica went on with, by reason.",
            "reason",
        )
        self._flex_tokens = self._counter(
            "lorikeet_flex_tokens_total",
            "Tokens of lines of batches and of requests of service tier flex.",
            "kind",
        )
        self._not_stored = Counter(
            "lorikeet_responses_not_stored_total",
            "Responses that could not be stored, because the store failed or they were too large.",
            registry=self._registry,
        )
        self._proofs = self._counter(
            "lorikeet_parity_proofs_total",
            "Parity proofs of adapters with their trainers, by verdict and cause.",
            "verdict",
            "cause",
        )
        self._parity_nats = Histogram(
            "lorikeet_parity_mean_nats",
            "Mean difference of log-probabilities between replica and trainer, of each proof.",
            ["base_model"],
            buckets=_PARITY_NATS,
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "lorikeet_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _FIRST_TOKEN_S,
        )
        self._queue = self._histogram(
            "lorikeet_request_queue_time_seconds",
            "Time that a finished request waited in the engine, without the wait for its adapter.",
            _QUEUE_S,
        )
        self._total = self._histogram(
            "lorikeet_e2e_request_latency_seconds",
            "Time from a finished request's arrival to its end.",
            _REQUEST_S,
        )
        self.pushes = PushMetrics(self._registry)
        self._tenants = _tenants(min(_TENANTS, _TENANTS_OF_ALL // gateways))
        self._drafted, self._accepted = _adapter_drafts()
        self._adapters = _adapters(_ADAPTERS, self._drafted, self._accepted)
        self._registry.register(self._tenants)
        self._registry.register(self._adapters)

    def add_base_models(self, base_models: Iterable[str]) -> None:
        """Create the series of these base models, so that they show 0 from the start."""
        for base_model in base_models:
            self._retries.labels(base_model)
            for reason in ResumeReason:
                self._resumes.labels(base_model, reason)
            for outcome in OUTCOMES:
                self._requests.labels(base_model, outcome)

    def add_gauge(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Add a gauge.

        name, documentation: name and help text in Prometheus.
        value: returns the gauge's value; called at each collection, on any thread.
        """
        Gauge(name, documentation, registry=self._registry).set_function(value)

    def count(self, request: RequestRecord) -> None:
        """Count an ended request. Called by the request log."""
        model, outcome, usage = request.base_model or "", request.outcome, request.usage
        self._requests.labels(model, outcome).inc()
        if request.code is not None:
            self._errors.labels(model, request.code).inc()
        if request.retries:
            self._retries.labels(model).inc(request.retries)
        for reason in request.resumed:
            self._resumes.labels(model, reason).inc()
        if request.replica is not None and not request.background:
            self._observe_times(request, model, residency_label(request.residency))
        tokens = None
        if usage is not None:
            tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            if request.background:
                self._flex_tokens.labels(model, "prompt").inc(usage.prompt_tokens)
                self._flex_tokens.labels(model, "output").inc(usage.completion_tokens)
        if request.tenant:
            self._tenants.count(request.tenant, tokens, outcome)
        for adapter in request.adapter.members if request.adapter else ():
            name = self._adapters.count(f"{adapter.tenant}/{adapter.name}", tokens)
            for counts in request.drafts:
                self._drafted.add(counts.drafted, name, counts.source)
                self._accepted.add(counts.accepted, name, counts.source)

    def count_not_stored(self) -> None:
        """Count a response that could not be stored."""
        self._not_stored.inc()

    def count_parity(self, base_model: str, parity: Parity) -> None:
        """Count a parity proof (comparison with the trainer's log-probabilities) by its result."""
        cause = "" if parity.cause is None else parity.cause.value
        self._proofs.labels(base_model, parity.verdict.value, cause).inc()
        self._parity_nats.labels(base_model).observe(parity.mean)

    def collect(self) -> Iterable[Metric]:
        """Return all metrics with their current values."""
        return self._registry.collect()

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, ["base_model", *labels], registry=self._registry)

    def _histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
        labels = ["base_model", "residency"]
        return Histogram(name, documentation, labels, buckets=bounds, registry=self._registry)

    def _observe_times(self, request: RequestRecord, model: str, residency: str) -> None:
        if (first_token_s := request.first_token_s) is not None:
            self._first_token.labels(model, residency).observe(first_token_s)
        if (slowest := request.slowest) is not None:
            queue_s = max(0.0, slowest.queued_s - slowest.load_s)
            self._queue.labels(model, residency).observe(queue_s)
        if request.usage is not None and request.code is None:
            self._total.labels(model, residency).observe(request.until_s)


class PushMetrics:
    """Metrics of adapter versions that trainers push to one gateway. Event loop only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._taken = Counter(
            "lorikeet_pushes_total",
            "Pushed versions that passed the check and were accepted.",
            registry=registry,
        )
        self._bytes = Counter(
            "lorikeet_pushed_bytes_total", "Bytes of accepted pushed versions.", registry=registry
        )
        self._ready = Histogram(
            "lorikeet_push_ready_seconds",
            "Time from the end of a pushed version's check until all replicas hold the version.",
            buckets=_PUSH_S,
            registry=registry,
        )
        self._durable = Histogram(
            "lorikeet_push_durable_seconds",
            "Time from the end of a pushed version's check until the store holds the version.",
            buckets=_PUSH_S,
            registry=registry,
        )

    def taken(self, size_bytes: int) -> None:
        """Count a pushed version that passed the check and was accepted."""
        self._taken.inc()
        self._bytes.inc(size_bytes)

    def ready(self, took_s: float) -> None:
        """Count a pushed version that all replicas now hold.

        took_s: seconds from the end of the version's check until all replicas held it.
        """
        self._ready.observe(took_s)

    def durable(self, took_s: float) -> None:
        """Count a pushed version that the store now holds.

        took_s: seconds from the end of the version's check until the store held it.
        """
        self._durable.observe(took_s)


def _tenants(most: int) -> BusiestNameCounters:
    requests = NamedCounter(
        "lorikeet_tenant_requests_total",
        "Ended requests of a tenant, by outcome.",
        ("tenant", "outcome"),
    )
    tokens = NamedCounter(
        "lorikeet_tenant_tokens_total",
        "Tokens of a tenant's finished requests; prompt tokens include cached tokens.",
        ("tenant", "kind"),
    )
    return BusiestNameCounters(requests, tokens, max(1, most))


def _adapter_drafts() -> tuple[NamedCounter, NamedCounter]:
    """Return two counters by adapter: of tokens drafted in speculative decoding, and of those that
    were accepted.
    """
    drafted = NamedCounter(
        "lorikeet_adapter_drafted_tokens_total",
        "Drafted tokens of an adapter's finished requests, by the source of drafts.",
        ("adapter", "source"),
    )
    accepted = NamedCounter(
        "lorikeet_adapter_accepted_tokens_total",
        "Drafted tokens of an adapter's finished requests that became output tokens, by source.",
        ("adapter", "source"),
    )
    return drafted, accepted


def _adapters(most: int, *others: NamedCounter) -> BusiestNameCounters:
    requests = NamedCounter(
        "lorikeet_adapter_requests_total",
        "Ended requests of an adapter; all but the busiest adapters together, as other.",
        ("adapter",),
    )
    tokens = NamedCounter(
        "lorikeet_adapter_tokens_total",
        "Tokens of an adapter's finished requests; prompt tokens include cached tokens.",
        ("adapter", "kind"),
    )
    return BusiestNameCounters(requests, tokens, most, *others)
