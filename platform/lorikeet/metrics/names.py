"""What the busiest tenants and adapters do, by name, and all others together."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily

from lorikeet.metrics.busiest import Busiest
from lorikeet.metrics.ended import TOKENS, Ended


class NamedCounts:
    """Requests and tokens of tenants and adapters. One thread counts; others may collect."""

    def __init__(self, tenants: int, adapters: int) -> None:
        """tenants, adapters: so many are named, but one at least."""
        self._tenant_requests = NamedCounter(
            "lorikeet_tenant_requests_total",
            "Requests of a tenant that are over, by what became of them.",
            ("tenant", "outcome"),
        )
        self._tenant_tokens = NamedCounter(
            "lorikeet_tenant_tokens_total",
            "Tokens of a tenant's finished requests; cached ones are among those of prompts.",
            ("tenant", "kind"),
        )
        self._adapter_requests = NamedCounter(
            "lorikeet_adapter_requests_total",
            "Requests of an adapter that are over; of all but the busiest together, as other.",
            ("adapter",),
        )
        self._adapter_tokens = NamedCounter(
            "lorikeet_adapter_tokens_total",
            "Tokens of an adapter's finished requests; cached ones are among those of prompts.",
            ("adapter", "kind"),
        )
        self._tenants = Busiest(max(1, tenants), self._drop_tenant)
        self._adapters = Busiest(max(1, adapters), self._drop_adapter)

    def ended(self, request: Ended) -> None:
        """A request is over."""
        if request.tenant:
            tenant = self._tenants.used(request.tenant)
            self._tenant_requests.add(1, tenant, request.outcome)
            _add_tokens(self._tenant_tokens, request, tenant)
        if request.adapter is not None:
            adapter = self._adapters.used(request.adapter)
            self._adapter_requests.add(1, adapter)
            _add_tokens(self._adapter_tokens, request, adapter)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """All of it, as it is now."""
        yield self._tenant_requests.collect()
        yield self._tenant_tokens.collect()
        yield self._adapter_requests.collect()
        yield self._adapter_tokens.collect()

    def _drop_tenant(self, name: str) -> None:
        self._tenant_requests.drop(name)
        self._tenant_tokens.drop(name)

    def _drop_adapter(self, name: str) -> None:
        self._adapter_requests.drop(name)
        self._adapter_tokens.drop(name)


class NamedCounter:
    """A counter whose first label is a name that can be dropped with all its series.

    Plain numbers, collected several times as fast as prometheus_client's own children.
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

    def collect(self) -> CounterMetricFamily:
        """All its series."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for name, series in self._series.copy().items():
            for labels, value in series.copy().items():
                family.add_metric((name, *labels), value)
        return family


def _add_tokens(counter: NamedCounter, request: Ended, name: str) -> None:
    if request.tokens is not None:
        for kind, count in zip(TOKENS, request.tokens, strict=True):
            counter.add(count, name, kind)
