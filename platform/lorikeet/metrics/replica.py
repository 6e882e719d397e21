"""What a replica measures: its engine's counts as Prometheus's metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from lorikeet.metrics.families import counter, gauge, histogram, residency_label
from lorikeet_engine.counts import EngineCounts


def replica_metrics(counts: EngineCounts) -> Iterator[Metric]:
    """All of them. A histogram is there once it has a value."""
    yield from _tiers(counts)
    yield from _loads(counts)
    yield from _engine(counts)
    yield from _steps(counts)


def _tiers(counts: EngineCounts) -> Iterator[Metric]:
    tiers = {str(tier): held for tier, held in counts.tiers.items()}
    yield gauge(
        "lorikeet_adapters",
        "Adapters that a tier holds; one counts in every tier that holds it.",
        "tier",
        {tier: held.adapters for tier, held in tiers.items()},
    )
    yield gauge(
        "lorikeet_adapter_bytes",
        "Bytes that adapters take in a tier.",
        "tier",
        {tier: held.used_bytes for tier, held in tiers.items()},
    )
    yield gauge(
        "lorikeet_adapter_capacity_bytes",
        "Bytes that a tier has for adapters.",
        "tier",
        {tier: held.capacity_bytes for tier, held in tiers.items()},
    )
    yield counter(
        "lorikeet_adapter_evictions_total",
        "Adapters that a tier has let go to make room.",
        "tier",
        {tier: held.evictions for tier, held in tiers.items()},
    )


def _loads(counts: EngineCounts) -> Iterator[Metric]:
    yield counter(
        "lorikeet_adapter_lookups_total",
        "Requests by where their adapter was when they came.",
        "found",
        {str(tier): found for tier, found in counts.lookups.items()},
    )
    loads = {str(tier): seconds for tier, seconds in counts.loads.items()}
    yield counter(
        "lorikeet_adapter_loads_total",
        "Adapters brought one tier nearer, by the tier they were brought from.",
        "source",
        {source: sum(seconds.counts) for source, seconds in loads.items()},
    )
    yield histogram(
        "lorikeet_adapter_load_seconds",
        "How long it took to bring an adapter one tier nearer, by the tier it was brought from.",
        "source",
        loads,
    )
    yield CounterMetricFamily(
        "lorikeet_adapter_load_failures_total", "Loads that failed.", counts.load_failures
    )


def _engine(counts: EngineCounts) -> Iterator[Metric]:
    yield gauge(
        "lorikeet_sequences",
        "Sequences that run, and that wait to begin or to go on.",
        "state",
        {"running": counts.running, "waiting": counts.waiting},
    )
    yield gauge(
        "lorikeet_kv_pages",
        "Pages of the KV cache that sequences use, and that there are.",
        "state",
        {"used": counts.kv_pages_used, "total": counts.kv_pages_total},
    )
    yield CounterMetricFamily(
        "lorikeet_preemptions_total",
        "Sequences that lost their KV pages to others and had to begin anew.",
        counts.preemptions,
    )
    yield counter(
        "lorikeet_tokens_total",
        "Tokens of prompts that were begun, those of them that were found cached, tokens made.",
        "kind",
        {
            "prompt": counts.prompt_tokens,
            "cached": counts.cached_tokens,
            "output": counts.output_tokens,
        },
    )


def _steps(counts: EngineCounts) -> Iterator[Metric]:
    yield histogram("lorikeet_step_seconds", "What a step took.", None, {"": counts.step_s})
    yield histogram(
        "lorikeet_step_sequences", "Sequences of a step.", None, {"": counts.step_sequences}
    )
    yield histogram(
        "lorikeet_step_adapters", "Distinct adapters of a step.", None, {"": counts.step_adapters}
    )
    yield histogram(
        "lorikeet_inter_token_seconds",
        "Between two tokens of a sequence, by where its adapter was when the request came.",
        "residency",
        {residency_label(found): gaps for found, gaps in counts.inter_token_s.items()},
    )
