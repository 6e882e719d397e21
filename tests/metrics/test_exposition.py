"""Exposition text: Prometheus reads the samples as they were, with any label values."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from lorikeet.metrics.exposition import join, render
from tests.metrics.scraping import Scraped, check_with_promtool

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def read(*metrics: Metric, **labels: str) -> Scraped:
    return Scraped(join([render(metrics, labels)]).decode())


@settings(deadline=None)
@given(NAMES, NAMES)
def test_any_label_value_is_read_back(tenant: str, gateway: str) -> None:
    tokens = CounterMetricFamily("lorikeet_tokens_total", "Tokens.", labels=["tenant"])
    tokens.add_metric([tenant], 7)
    tokens.add_metric([f"{tenant} junior"], 8)
    page = read(tokens, gateway=gateway)
    assert page.total("lorikeet_tokens_total", tenant=tenant, gateway=gateway) == 7
    assert page.total("lorikeet_tokens_total") == 15


def test_promtool_accepts_label_values_with_quotes_and_newlines() -> None:
    tokens = CounterMetricFamily("lorikeet_tokens_total", "Tokens.", labels=["tenant"])
    tokens.add_metric(['a"} 1\nlorikeet_fake{b="\\'], 7)
    check_with_promtool(join([render([tokens], {"gateway": "ü\\n"})]))


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_a_number_is_read_back_exactly(value: float) -> None:
    page = read(GaugeMetricFamily("lorikeet_pins", "Pins.", value))
    assert page.total("lorikeet_pins") == value


def test_nan_is_read_back() -> None:
    page = read(GaugeMetricFamily("lorikeet_pins", "Pins.", math.nan))
    assert math.isnan(page.total("lorikeet_pins"))


def test_joined_parts_share_their_headers() -> None:
    parts = []
    for replica in ("one", "two"):
        seconds = HistogramMetricFamily("lorikeet_step_seconds", "What a step took.", labels=[])
        seconds.add_metric([], [("0.5", 1), ("+Inf", 3)], 4.5)
        only = GaugeMetricFamily(f"lorikeet_only_of_{replica}_seconds", "One's.", 1)
        parts.append(render([seconds, only], {"replica": replica}))
    text = join(parts).decode()
    assert text.count("# TYPE lorikeet_step_seconds histogram") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["lorikeet_step_seconds"].type == "histogram"
    page = Scraped(text)
    assert page.total("lorikeet_step_seconds_bucket", replica="two", le="+Inf") == 3
    assert page.labels("lorikeet_step_seconds_sum", "replica") == {"one", "two"}
    check_with_promtool(text.encode())


def test_metrics_without_samples_are_left_out() -> None:
    assert join([render([GaugeMetricFamily("lorikeet_pins", "Pins.", labels=["x"])], {})]) == b""


def test_created_samples_are_left_out() -> None:
    registry = CollectorRegistry()
    Counter("lorikeet_request_retries_total", "Retries.", registry=registry).inc()
    assert Scraped(render(registry.collect(), {}).decode()).names == {
        "lorikeet_request_retries_total"
    }
