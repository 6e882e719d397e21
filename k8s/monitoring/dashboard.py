"""Dashboard in Grafana's format, which `python -m k8s.monitoring.make` writes to lorikeet.json."""

from collections.abc import Iterator
from typing import Any

from k8s.monitoring.panels import ROWS, Panel

Json = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8


def dashboard() -> Json:
    """Return the dashboard: a Grafana row for each of ROWS, with panels three side by side."""
    return {
        "uid": "lorikeet",
        "title": "Lorikeet",
        "tags": ["lorikeet"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": [_source(), _base_model()]},
        "annotations": {"list": []},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[Json]:
    number = y = 0
    for row, panels in ROWS.items():
        number += 1
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": row, "gridPos": place, "panels": []}
        for index, panel in enumerate(panels):
            number += 1
            down, right = divmod(index, _COLUMNS // _WIDTH)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": right * _WIDTH, "y": y + 1 + down * _HEIGHT}
            yield {"id": number, "gridPos": place, **_time_series(panel)}
        y += 1 + -(-len(panels) * _WIDTH // _COLUMNS) * _HEIGHT


def _time_series(panel: Panel) -> Json:
    custom = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": curve.query,
                "legendFormat": curve.legend,
                "editorMode": "code",
                "range": True,
            }
            for index, curve in enumerate(panel.curves)
        ],
    }


def _source() -> Json:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _base_model() -> Json:
    query = "label_values(lorikeet_kv_cache_pages, base_model)"
    return {
        "name": "base_model",
        "type": "query",
        "label": "Base model",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "base_model"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }
