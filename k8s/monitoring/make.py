"""Generator of the dashboard and the PrometheusRule: python -m k8s.monitoring.make."""

import json
from pathlib import Path

import yaml

from k8s.monitoring.dashboard import dashboard

HERE = Path(__file__).parent
_NOTE = "# Made of rules.yaml by make.py.\n"


def made() -> dict[str, str]:
    """Return the text of each generated file, by name."""
    rules = yaml.safe_load((HERE / "rules.yaml").read_text())
    rules = json.loads(json.dumps(rules))  # without anchors
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "lorikeet"},
        "spec": rules,
    }
    return {
        "lorikeet.json": json.dumps(dashboard(), indent=1) + "\n",
        "prometheusrule.yaml": _NOTE + yaml.safe_dump(resource, sort_keys=False, width=100),
    }


if __name__ == "__main__":
    for name, text in made().items():
        (HERE / name).write_text(text)
