"""Metrics of a replica's status, as Prometheus reads them."""

from dataclasses import replace

from lorikeet.metrics.exposition import join, render
from lorikeet.metrics.replica import replica_metrics
from tests.metrics.scraping import Scraped, check_with_promtool
from tests.metrics.statuses import INFO, engine_status


def page_of(status) -> Scraped:
    text = join([render(replica_metrics(status, INFO), {"base_model": "tiny", "replica": "r0"})])
    check_with_promtool(text)
    return Scraped(text.decode())


def test_every_number_of_the_status_has_its_metric() -> None:
    page = page_of(engine_status())
    tiers = {"gpu": (3, 300, 1000, 7), "host": (5, 500, 2000, 8), "disk": (100_000, 9000, 9999, 9)}
    for tier, numbers in tiers.items():
        names = ("adapters", "adapter_bytes", "adapter_capacity_bytes", "adapter_evictions_total")
        found = tuple(page.total(f"lorikeet_{name}", tier=tier) for name in names)
        assert found == numbers
    lookups = {"gpu": 40, "host": 30, "disk": 20, "remote": 10}
    for found, requests in lookups.items():
        assert page.total("lorikeet_adapter_lookups_total", residency=found) == requests
    assert page.total("lorikeet_adapter_loads_total", source="remote") == 3
    assert page.total("lorikeet_adapter_load_seconds_count", source="remote") == 3
    assert page.total("lorikeet_adapter_load_seconds_sum", source="remote") == 1.5
    assert page.total("lorikeet_adapter_load_failures_total") == 4
    assert page.total("lorikeet_sequences", state="running") == 11
    assert page.total("lorikeet_sequences", state="waiting") == 12
    assert page.total("lorikeet_kv_cache_pages", state="used") == 13
    assert page.total("lorikeet_kv_cache_pages", state="total") == 14
    for state, slots in (("running", 19), ("cached", 20), ("total", 50)):
        assert page.total("lorikeet_states", state=state) == slots
    assert page.total("lorikeet_state_bytes") == 21
    for event, times in (("restored", 22), ("saved", 23), ("evicted", 24)):
        assert page.total("lorikeet_state_events_total", event=event) == times
    for state, pages in (("used", 31), ("prompts", 12), ("total", 60)):
        assert page.total("lorikeet_kv_host_pages", state=state) == pages
    assert page.total("lorikeet_kv_host_page_bytes") == 32
    for event, times in (("stored", 33), ("fetched", 34), ("evicted", 35), ("damaged", 36)):
        assert page.total("lorikeet_kv_host_page_events_total", event=event) == times
    assert page.total("lorikeet_kv_host_tokens_total") == 37
    for state, pages in (("used", 38), ("total", 70)):
        assert page.total("lorikeet_kv_disk_pages", state=state) == pages
    for event, times in (("written", 39), ("read", 40)):
        assert page.total("lorikeet_kv_disk_page_events_total", event=event) == times
    for side, units in (("adapters", 42), ("pages", 43), ("lendable", 45), ("moving", 46)):
        assert page.total("lorikeet_border_units", side=side) == units
    assert page.total("lorikeet_border_unit_bytes") == 41
    for to, units in (("adapters", 47), ("pages", 48)):
        assert page.total("lorikeet_border_moves_total", to=to) == units
    assert page.total("lorikeet_preemptions_total") == 15
    assert page.total("lorikeet_tensor_parallel") == 2
    rounded = {"weights": "nf4, rounded to fp8", "kv_cache": "fp8"}
    assert page.total("lorikeet_base_model_info", base_model="tiny", **rounded) == 1
    for kind, tokens in (("prompt", 16), ("cached", 17), ("output", 18)):
        assert page.total("lorikeet_tokens_total", kind=kind) == tokens
    assert page.total("lorikeet_drafted_tokens_total", source="lookup") == 26
    assert page.total("lorikeet_accepted_tokens_total", source="lookup") == 25
    assert page.total("lorikeet_drafted_tokens_total", source="answers") == 28
    assert page.total("lorikeet_accepted_tokens_total", source="answers") == 27
    for name in ("seconds", "sequences", "adapters"):
        assert page.total(f"lorikeet_step_{name}_count", replica="r0", base_model="tiny") == 3
    assert page.total("lorikeet_inter_token_latency_seconds_count", residency="none") == 3


def test_an_engine_without_pages_on_the_host_has_no_metrics_of_them() -> None:
    page = page_of(replace(engine_status(), host_pages=None))
    assert not page.labels("lorikeet_kv_host_pages", "state")


def test_a_model_without_delta_nets_has_no_metrics_of_states() -> None:
    page = page_of(replace(engine_status(), states=None))
    assert not page.labels("lorikeet_states", "state")


def test_buckets_are_cumulative() -> None:
    page = page_of(engine_status())
    buckets = {"0.1": 1, "1.0": 3, "+Inf": 3}
    for bound, values in buckets.items():
        assert page.total("lorikeet_step_seconds_bucket", le=bound) == values


def test_empty_distributions_have_counters_but_no_histograms() -> None:
    page = page_of(engine_status())
    assert page.total("lorikeet_adapter_loads_total", source="host") == 0
    assert page.labels("lorikeet_adapter_loads_total", "source") == {"remote", "disk", "host"}
    assert page.labels("lorikeet_adapter_load_seconds_count", "source") == {"remote"}
    assert page.labels("lorikeet_inter_token_latency_seconds_count", "residency") == {"none"}
