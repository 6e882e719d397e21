"""Metrics of a replica: the status of its engine as Prometheus metric families."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lorikeet.metrics.metric_builders import counter, gauge, histogram, residency_label
from lorikeet_engine.telemetry.status import (
    BorderUsage,
    EngineInfo,
    EngineStatus,
    HostPageUsage,
    StateUsage,
)


def replica_metrics(status: EngineStatus, info: EngineInfo) -> Iterator[Metric]:
    """Generate the replica's metrics. Empty histograms are left out."""
    yield _base_model_info(info)
    yield from _tiers(status)
    yield from _loads(status)
    yield from _engine(status)
    yield from _steps(status)


def _base_model_info(info: EngineInfo) -> Metric:
    family = GaugeMetricFamily(
        "lorikeet_base_model_info",
        "Always 1; labels: formats that the base model's weights and its KV cache are rounded to.",
        labels=["weights", "kv_cache"],
    )
    family.add_metric([info.quantization or "none", "fp8" if info.fp8_kv else "none"], 1)
    return family


def _tiers(status: EngineStatus) -> Iterator[Metric]:
    tiers = {str(tier): held for tier, held in status.tiers.items()}
    yield gauge(
        "lorikeet_adapters",
        "Adapters in a tier; an adapter counts in every tier that holds it.",
        "tier",
        {tier: held.adapters for tier, held in tiers.items()},
    )
    yield gauge(
        "lorikeet_adapter_bytes",
        "Bytes of the adapters in a tier.",
        "tier",
        {tier: held.used_bytes for tier, held in tiers.items()},
    )
    yield gauge(
        "lorikeet_adapter_capacity_bytes",
        "Bytes that a tier can hold.",
        "tier",
        {tier: held.capacity_bytes for tier, held in tiers.items()},
    )
    yield counter(
        "lorikeet_adapter_evictions_total",
        "Adapters evicted from a tier.",
        "tier",
        {tier: held.evictions for tier, held in tiers.items()},
    )
    yield counter(
        "lorikeet_adapter_checksum_failures_total",
        "Adapters found damaged in a tier and loaded again.",
        "tier",
        {tier: held.checksum_failures for tier, held in tiers.items()},
    )


def _loads(status: EngineStatus) -> Iterator[Metric]:
    yield counter(
        "lorikeet_adapter_lookups_total",
        "Requests, by the nearest tier that held their adapter on arrival.",
        "residency",
        {str(tier): requests for tier, requests in status.lookups.items()},
    )
    loads = {str(tier): seconds for tier, seconds in status.loads.items()}
    yield counter(
        "lorikeet_adapter_loads_total",
        "Loads of an adapter to the next nearer tier, by source tier.",
        "source",
        {source: sum(seconds.counts) for source, seconds in loads.items()},
    )
    yield histogram(
        "lorikeet_adapter_load_seconds",
        "Duration of a load of an adapter to the next nearer tier, by source tier.",
        "source",
        loads,
    )
    yield CounterMetricFamily(
        "lorikeet_adapter_load_failures_total", "Failed loads of adapters.", status.load_failures
    )


def _engine(status: EngineStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "lorikeet_tensor_parallel",
        "GPUs that the base model is sharded over; processes if there are no GPUs.",
        status.tensor_parallel,
    )
    yield gauge(
        "lorikeet_sequences",
        "Sequences that run, and sequences that wait to start or to continue.",
        "state",
        {"running": status.live.running, "waiting": status.live.waiting},
    )
    yield gauge(
        "lorikeet_kv_cache_pages",
        "Pages of the KV cache: used by sequences, and in total.",
        "state",
        {"used": status.live.kv_pages_used, "total": status.live.kv_pages_total},
    )
    if status.states is not None:
        yield from _states(status.states)
    if status.host_pages is not None:
        yield from _host_pages(status.host_pages)
    if status.border is not None:
        yield from _border(status.border)
    yield CounterMetricFamily(
        "lorikeet_preemptions_total",
        "Sequences that lost their KV pages or batch slot to others and are recomputed.",
        status.preemptions,
    )
    yield counter(
        "lorikeet_tokens_total",
        "Prompt tokens, prompt tokens found in the KV cache, and output tokens.",
        "kind",
        {
            "prompt": status.prompt_tokens,
            "cached": status.cached_tokens,
            "output": status.output_tokens,
        },
    )
    yield counter(
        "lorikeet_drafted_tokens_total",
        "Drafted tokens that steps have verified, by the source of drafts.",
        "source",
        {counts.source: counts.drafted for counts in status.drafts},
    )
    yield counter(
        "lorikeet_accepted_tokens_total",
        "Drafted tokens that became output tokens, by the source of drafts.",
        "source",
        {counts.source: counts.accepted for counts in status.drafts},
    )


def _states(states: StateUsage) -> Iterator[Metric]:
    yield gauge(
        "lorikeet_states",
        "States of delta nets and Mamba 2: of running sequences, cached, and room for in total.",
        "state",
        {"running": states.running, "cached": states.cached, "total": states.slots},
    )
    yield GaugeMetricFamily(
        "lorikeet_state_bytes", "Bytes of one sequence's state on each GPU.", states.slot_bytes
    )
    yield counter(
        "lorikeet_state_events_total",
        "Sequences that began with a cached state, states cached, and cached states evicted.",
        "event",
        {"restored": states.restored, "saved": states.saved, "evicted": states.evicted},
    )


def _border(border: BorderUsage) -> Iterator[Metric]:
    yield gauge(
        "lorikeet_border_units",
        "Units of GPU memory of adapters and KV pages, most that adapters may borrow, and moving.",
        "side",
        {
            "adapters": border.arena_units,
            "pages": border.kv_units,
            "lendable": border.lendable_units,
            "moving": border.moving,
        },
    )
    yield GaugeMetricFamily(
        "lorikeet_border_unit_bytes", "Bytes of one unit on each GPU.", border.unit_bytes
    )
    yield counter(
        "lorikeet_border_moves_total",
        "Units that have moved to adapters, and to KV pages.",
        "to",
        {"adapters": border.to_adapters, "pages": border.to_pages},
    )


def _host_pages(pages: HostPageUsage) -> Iterator[Metric]:
    yield gauge(
        "lorikeet_kv_host_pages",
        "KV pages in host memory, those of pinned prompts, and room for in total.",
        "state",
        {"used": pages.used, "prompts": pages.of_prompts, "total": pages.pages},
    )
    yield GaugeMetricFamily(
        "lorikeet_kv_host_page_bytes", "Bytes of one KV page on each GPU.", pages.page_bytes
    )
    yield counter(
        "lorikeet_kv_host_page_events_total",
        "KV pages copied to the host, copied back, replaced by others, and found damaged.",
        "event",
        {
            "stored": pages.stored,
            "fetched": pages.fetched,
            "evicted": pages.evicted,
            "damaged": pages.damaged,
        },
    )
    yield CounterMetricFamily(
        "lorikeet_kv_host_tokens_total",
        "Prompt tokens whose KV pages came from host memory or the disk.",
        pages.tokens,
    )
    if pages.disk_pages:
        yield gauge(
            "lorikeet_kv_disk_pages",
            "KV pages in the file on the disk, and room for in total.",
            "state",
            {"used": pages.on_disk, "total": pages.disk_pages},
        )
        yield counter(
            "lorikeet_kv_disk_page_events_total",
            "KV pages and states written to the file on the disk, and read from it.",
            "event",
            {"written": pages.written, "read": pages.read},
        )


def _steps(status: EngineStatus) -> Iterator[Metric]:
    yield histogram(
        "lorikeet_step_seconds", "Duration of an engine step.", None, {"": status.step_s}
    )
    yield histogram(
        "lorikeet_step_sequences", "Sequences of an engine step.", None, {"": status.step_sequences}
    )
    yield histogram(
        "lorikeet_step_adapters",
        "Distinct adapters of an engine step.",
        None,
        {"": status.step_adapters},
    )
    yield histogram(
        "lorikeet_inter_token_latency_seconds",
        "Time between two tokens of a sequence, by the tier of its adapter on arrival.",
        "residency",
        {residency_label(found): gaps for found, gaps in status.inter_token_s.items()},
    )
