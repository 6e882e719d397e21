"""Dashboard, alerts and their sources."""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from k8s.monitoring.dashboard import dashboard
from k8s.monitoring.make import HERE, made
from k8s.monitoring.panels import ROWS
from lorikeet.metrics.controller import ReplicaCount, controller_metrics
from lorikeet.metrics.exposition import render
from lorikeet.metrics.replica import replica_metrics
from lorikeet.protocol.messages import Call, Refusal
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.counters import LOAD_S, STEP_S
from lorikeet_engine.telemetry.status import Distribution
from tests.gateway.conftest import Items, chat, serving
from tests.gateway.test_why import told
from tests.k8s.manifests import OVERLAYS, ROOT, Manifest, of_kind, pods, problems, selects
from tests.k8s.manifests import render as rendered
from tests.metrics.statuses import INFO, engine_status

OPERATIONS = ROOT / "docs" / "operations.md"
RULES = HERE / "rules.yaml"
_NAME = re.compile(r"\b(lorikeet_\w+)(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)(=~?|!=)"([^"]*)"')
_GROUPED = re.compile(r"\bby \(([^)]*)\)")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def shown() -> dict[str, list[str]]:
    """Return the queries of each panel, as Prometheus receives them."""
    return {
        panel.title: [_plain(curve.query) for curve in panel.curves]
        for panels in ROWS.values()
        for panel in panels
    }


def _plain(query: str) -> str:
    return query.replace("$__rate_interval", "5m").replace("$base_model", ".*")


def promtool(*words: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool, of Debian's package `prometheus`, is not installed")
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_files_of_monitoring_are_up_to_date() -> None:
    for name, text in made().items():
        assert (HERE / name).read_text() == text, "run python -m k8s.monitoring.make"


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", str(Path(__file__).parent / "rules.test.yaml"))


def test_prometheus_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [query for panel in shown().values() for query in panel]
    records = [{"record": f"shown:{i}", "expr": query} for i, query in enumerate(queries)]
    file = tmp_path / "shown.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": records}]}))
    promtool("check", "rules", str(file))


def test_every_alert_has_a_summary_and_a_runbook() -> None:
    told_of = set(re.findall(r"^### (\w+)$", OPERATIONS.read_text(), re.MULTILINE))
    assert told_of >= {alert["alert"] for alert in alerts()}
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description", "runbook"} == alert["annotations"].keys()
        anchor = f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook"] == anchor


def test_every_alert_has_a_test() -> None:
    tests = (Path(__file__).parent / "rules.test.yaml").read_text()
    for alert in alerts():
        assert alert["alert"] in tests


def test_grafana_can_place_every_panel() -> None:
    built = dashboard()
    ids = [panel["id"] for panel in built["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in built["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    variables = {variable["name"] for variable in built["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(built["panels"]))) - {"__rate_interval"}
    assert used == variables


def test_every_queried_metric_exists(tmp_path: Path) -> None:
    """Every name, label and value in rules and dashboard is on a gateway's page of metrics."""
    series = _series(_scraped(tmp_path))
    asked = [query for panel in shown().values() for query in panel]
    asked += [rule["expr"] for rule in rules()]
    wrong = {query: list(_unknown(query, series)) for query in asked}
    assert {query: names for query, names in wrong.items() if names} == {}


def _unknown(query: str, series: dict[str, dict[str, set[str]]]) -> Iterator[str]:
    labels: set[str] = set()
    for name, where in _NAME.findall(query):
        if name not in series:
            yield name
            continue
        labels |= series[name].keys()
        for label, operator, value in _MATCHER.findall(where):
            values = series[name].get(label, set())
            wanted = value.split("|") if operator == "=~" else [value]
            if not values or not (set(wanted) <= values or value == ".*"):
                yield f"{name}{{{label}{operator}{value}}}"
    for grouped in _GROUPED.findall(query):
        yield from (f"by {label}" for label in set(re.findall(r"\w+", grouped)) - labels if labels)


def _series(page: str) -> dict[str, dict[str, set[str]]]:
    """Return the labels of the samples, with their values, by name."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = found.setdefault(sample.name, defaultdict(set))
            for label, value in sample.labels.items():
                labels[label].add(value)
    return found


def _scraped(folder: Path) -> str:
    """Return a gateway's metrics after an answer and a refusal, with replica and controller."""

    async def pages() -> Sequence[bytes]:
        replica = {"base_model": "tiny", "replica": "r0"}
        control = controller_metrics([], {"tiny": ReplicaCount(2, 1)}, 0.1)
        return [render(replica_metrics(_STATUS, INFO), replica), render(control, {})]

    async def overloaded(call: Call) -> Items:
        yield Refusal("overloaded", "later")

    with serving(folder, metrics_pages=pages) as gateway:
        for replay in (told, overloaded):
            gateway.engines.replay = replay
            gateway.post("/v1/chat/completions", chat(service_tier="flex"))
            gateway.post("/v1/chat/completions", chat())
        return gateway.request("GET", "/metrics", gateway.admin_key).text


def _some(bounds: Sequence[float]) -> Distribution:
    return Distribution(tuple(bounds), (1,) * (len(bounds) + 1), 1.0)


_STATUS = replace(
    engine_status(_some(STEP_S)),
    loads={tier: _some(LOAD_S) for tier in Residency if tier is not Residency.GPU},
)


def _of_kind(kind: str) -> Manifest:
    (found,) = [m for m in rendered("../monitoring") if m["kind"] == kind]
    return found


def test_the_kustomization_contains_the_generated_files() -> None:
    config = _of_kind("ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["lorikeet.json"]) == dashboard()
    assert _of_kind("PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())
    assert {m["metadata"]["namespace"] for m in rendered("../monitoring")} == {"lorikeet"}


def test_every_object_fits_its_schema() -> None:
    found = {each["kind"]: problems(each) for each in rendered("../monitoring")}
    assert {"PrometheusRule", "ScrapeConfig"} <= found.keys()
    assert {kind: wrong for kind, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("kind", ["PrometheusRule", "ScrapeConfig"])
def test_a_misspelt_field_for_prometheus_operator_is_caught(kind: str) -> None:
    wrong = deepcopy(_of_kind(kind))
    wrong["spec"]["scrapeIntervall"] = "15s"
    (problem,) = problems(wrong)
    assert "scrapeIntervall" in problem


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_scrape_of_the_admin_service_with_its_own_key_returns_all_metrics(overlay: str) -> None:
    scrape = _of_kind("ScrapeConfig")["spec"]
    (admin,) = (s for s in of_kind(overlay, "Service") if s["metadata"]["name"] == "lorikeet-admin")
    (port,) = admin["spec"]["ports"]
    target = f"lorikeet-admin.{admin['metadata']['namespace']}:{port['port']}"
    job = {"job": "lorikeet"}  # which LorikeetNotScraped asks for
    assert scrape["staticConfigs"] == [{"targets": [target], "labels": job}]
    secret = scrape["authorization"]["credentials"]
    create = f"create secret generic {secret['name']} --from-literal={secret['key']}=lk_"
    assert create in (ROOT / "k8s" / "README.md").read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_gateways_reach_the_trace_collector(overlay: str) -> None:
    collectors = _of_kind("NetworkPolicy")["spec"]["podSelector"]
    assert selects(collectors, pods(overlay)["gateways"]["metadata"]["labels"])
