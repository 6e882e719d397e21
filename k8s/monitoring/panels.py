"""Contents of the dashboard: rows of panels, curves of a panel, query of a curve.

Units are Grafana's. Grafana fills in $base_model and $__rate_interval.
"""

from typing import NamedTuple

_MODEL = 'base_model=~"$base_model"'


class Curve(NamedTuple):
    """Query, and the legend of each series that it returns."""

    query: str
    legend: str


class Panel(NamedTuple):
    """Curves over time.

    stacked: whether to stack the curves, as their sum has a meaning.
    top: largest value of the axis; None for an open end.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    description: str = ""
    stacked: bool = False
    top: float | None = None


def rate(metric: str, by: str, where: str = _MODEL) -> str:
    """Return a query for a counter's rate per second, summed by a label.

    by: label or labels by which series are summed.
    where: label matchers that select the series.
    """
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "") -> str:
    """Return a query for a quantile of a histogram.

    share: the quantile, such as 0.99.
    by: label for each of whose values there is a quantile; "" for one quantile of all.
    """
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels)})"


def mean(metric: str) -> str:
    """Return a query for the mean of a histogram."""
    return f"{rate(f'{metric}_sum', 'base_model')} / {rate(f'{metric}_count', 'base_model')}"


def gauge(metric: str, by: str, where: str = _MODEL) -> str:
    """Return a query for a gauge, summed by a label.

    by: label or labels by which series are summed.
    where: label matchers that select the series.
    """
    return f"sum by ({by}) ({metric}{{{where}}})"


def both(metric: str, by: str = "") -> tuple[Curve, ...]:
    """Return the curves of a histogram's p50 and p99.

    by: as in `quantile`.
    """
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Curve(quantile(share, metric, by), f"p{round(100 * share)}{legend}")
        for share in (0.5, 0.99)
    )


def top(metric: str, name: str) -> tuple[Curve, ...]:
    """Return the curves of the ten names with the highest rate of a counter.

    name: label that holds the names.
    """
    return (Curve(f"topk(10, {rate(metric, name, '')})", f"{{{{{name}}}}}"),)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Clients": (
        Panel(
            "Time to first token, by where the adapter was",
            "s",
            both("lorikeet_time_to_first_token_seconds", "residency"),
            "Goal: 99% within 1 s.",
        ),
        Panel(
            "Time between tokens, by where the adapter was",
            "s",
            both("lorikeet_inter_token_latency_seconds", "residency"),
            "Goal: 99% within 50 ms.",
        ),
        Panel(
            "Queue time, by where the adapter was",
            "s",
            both("lorikeet_request_queue_time_seconds", "residency"),
            "Time in the engine, without the wait for the adapter.",
        ),
        Panel(
            "Requests",
            "reqps",
            (Curve(rate("lorikeet_requests_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens",
            "tokens/s",
            (Curve(rate("lorikeet_tokens_total", "kind"), "{{kind}}"),),
            "Prompt tokens, those found in the KV cache, and output tokens.",
        ),
        Panel(
            "Errors, by code",
            "reqps",
            (Curve(rate("lorikeet_request_errors_total", "code"), "{{code}}"),),
            stacked=True,
        ),
    ),
    "Adapters": (
        Panel(
            "Where requests found their adapter",
            "percentunit",
            (
                Curve(
                    rate("lorikeet_adapter_lookups_total", "residency")
                    + " / ignoring (residency) group_left "
                    + f"sum(rate(lorikeet_adapter_lookups_total{{{_MODEL}}}[$__rate_interval]))",
                    "{{residency}}",
                ),
            ),
            "The share of gpu is the hit rate.",
            stacked=True,
            top=1,
        ),
        Panel(
            "Resident",
            "short",
            (Curve(gauge("lorikeet_adapters", "tier"), "{{tier}}"),),
            "Sum over replicas; a disk that several share counts for each.",
        ),
        Panel(
            "Capacity in use",
            "percentunit",
            (
                Curve(
                    gauge("lorikeet_adapter_bytes", "tier")
                    + " / "
                    + gauge("lorikeet_adapter_capacity_bytes", "tier"),
                    "{{tier}}",
                ),
            ),
            top=1,
        ),
        Panel(
            "Loads, by source",
            "ops",
            (
                Curve(rate("lorikeet_adapter_loads_total", "source"), "{{source}}"),
                Curve(rate("lorikeet_adapter_load_failures_total", "base_model"), "failed"),
            ),
            stacked=True,
        ),
        Panel(
            "Load time, by source",
            "s",
            both("lorikeet_adapter_load_seconds", "source"),
        ),
        Panel(
            "Evictions, by tier",
            "ops",
            (Curve(rate("lorikeet_adapter_evictions_total", "tier"), "{{tier}}"),),
            stacked=True,
        ),
    ),
    "Engines": (
        Panel(
            "Sequences per step",
            "short",
            (*both("lorikeet_step_sequences"), Curve(mean("lorikeet_step_sequences"), "mean")),
        ),
        Panel(
            "Distinct adapters per step",
            "short",
            (*both("lorikeet_step_adapters"), Curve(mean("lorikeet_step_adapters"), "mean")),
        ),
        Panel("Step time", "s", both("lorikeet_step_seconds")),
        Panel(
            "KV pages in use, by replica",
            "percentunit",
            (
                Curve(
                    gauge("lorikeet_kv_cache_pages", "replica", f'state="used", {_MODEL}')
                    + " / "
                    + gauge("lorikeet_kv_cache_pages", "replica", f'state="total", {_MODEL}'),
                    "{{replica}}",
                ),
            ),
            top=1,
        ),
        Panel(
            "Preemptions, by replica",
            "ops",
            (Curve(rate("lorikeet_preemptions_total", "replica"), "{{replica}}"),),
            "Sequences that lost their KV pages and are recomputed.",
        ),
        Panel(
            "Sequences",
            "short",
            (Curve(gauge("lorikeet_sequences", "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Drafted tokens that were accepted, by source",
            "percentunit",
            (
                Curve(
                    rate("lorikeet_accepted_tokens_total", "source")
                    + " / "
                    + rate("lorikeet_drafted_tokens_total", "source"),
                    "{{source}}",
                ),
            ),
            "With LORIKEET_SPECULATION.",
            top=1,
        ),
        Panel(
            "KV pages on host and disk",
            "ops",
            (
                Curve(rate("lorikeet_kv_host_page_events_total", "event"), "host: {{event}}"),
                Curve(rate("lorikeet_kv_disk_page_events_total", "event"), "disk: {{event}}"),
            ),
            "With LORIKEET_KV_HOST_MEMORY and LORIKEET_KV_DISK.",
        ),
        Panel(
            "GPU memory of adapters and KV pages",
            "bytes",
            (
                Curve(
                    f"sum by (side) (lorikeet_border_units{{{_MODEL}}}"
                    " * on (base_model, replica) group_left"
                    f" lorikeet_border_unit_bytes{{{_MODEL}}})",
                    "{{side}}",
                ),
            ),
            "With LORIKEET_MOVING_BORDER.",
        ),
    ),
    "Tenants and adapters": (
        Panel("Requests by tenant", "reqps", top("lorikeet_tenant_requests_total", "tenant")),
        Panel("Tokens by tenant", "tokens/s", top("lorikeet_tenant_tokens_total", "tenant")),
        Panel("Requests by adapter", "reqps", top("lorikeet_adapter_requests_total", "adapter")),
        Panel(
            "Tokens of batches and tier flex",
            "tokens/s",
            (Curve(rate("lorikeet_flex_tokens_total", "kind"), "{{kind}}"),),
        ),
    ),
    "Control": (
        Panel(
            "Replicas",
            "short",
            (
                Curve(
                    f"max by (base_model, state) (lorikeet_replicas{{{_MODEL}}})",
                    "{{base_model}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Pins",
            "short",
            (
                Curve(gauge("lorikeet_pins", "state", ""), "{{state}}"),
                Curve(gauge("lorikeet_pins_unmet", "reason", ""), "unmet: {{reason}}"),
            ),
        ),
        Panel(
            "Age of the catalog",
            "s",
            (Curve("max by (gateway) (lorikeet_catalog_age_seconds)", "{{gateway}}"),),
            "Time since the store last answered.",
        ),
        Panel(
            "Requests in flight, by gateway",
            "short",
            (Curve(gauge("lorikeet_requests_in_flight", "gateway", ""), "{{gateway}}"),),
            stacked=True,
        ),
        Panel(
            "Requests retried on another replica",
            "reqps",
            (
                Curve(rate("lorikeet_request_retries_total", "gateway", ""), "{{gateway}}"),
                Curve(rate("lorikeet_request_resumes_total", "reason", ""), "resumed: {{reason}}"),
            ),
        ),
        Panel(
            "Time of the controller's survey of replicas",
            "s",
            (Curve("max(lorikeet_controller_survey_seconds)", "last"),),
        ),
    ),
}
