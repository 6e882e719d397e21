"""Rendered manifests, and the parts of them that tests check."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).parent / "schemas"
# The last is for tests only: `gpu` with every component.
OVERLAYS = ("local", "gpu", "eks", "gke", "../../tests/k8s/every-component")
CUSTOM = ("Gateway", "HTTPRoute", "PrometheusRule", "RayService", "ScrapeConfig")
DIGEST = "@sha256:[0-9a-f]{64}"

Manifest = dict[str, Any]


@cache
def render(overlay: str) -> tuple[Manifest, ...]:
    """Return the objects that `kubectl apply -k` would send."""
    kustomize = [["kubectl", "kustomize"], ["kustomize", "build"]]
    command = next((words for words in kustomize if shutil.which(words[0])), None)
    if command is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run(
        [*command, str(ROOT / "k8s/overlays" / overlay)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in render(overlay) if manifest["kind"] == kind]


def ray_service(overlay: str) -> Manifest:
    (service,) = of_kind(overlay, "RayService")
    return service


def groups(overlay: str) -> dict[str, Manifest]:
    """Return the worker groups by name, and the head as `head`."""
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def pods(overlay: str) -> dict[str, Manifest]:
    return {name: group["template"] for name, group in groups(overlay).items()}


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def settings(overlay: str) -> dict[str, str]:
    (config,) = of_kind(overlay, "ConfigMap")
    return dict(config["data"])


def problems(manifest: Manifest) -> list[str]:
    """Return the errors that Kubernetes would report: unknown and missing fields, wrong types."""
    validator = Draft202012Validator(_schema(manifest["kind"]))
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(manifest)
    ]


@cache
def _schema(kind: str) -> Manifest:
    envelope = ["apiVersion", "kind", "metadata"]
    if kind in CUSTOM:
        schema = _closed(json.loads((SCHEMAS / f"{kind.lower()}.json").read_text()))
        return {**schema, "required": [*envelope, "spec"]}
    kubernetes = json.loads((SCHEMAS / "kubernetes.json").read_text())
    return {"$defs": kubernetes["$defs"], **kubernetes["kinds"][kind], "required": envelope}


def _closed(schema: Any) -> Any:
    """Return the schema with every object closed to unnamed fields."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def selects(selector: Manifest, labels: Manifest) -> bool:
    """Whether a label selector matches: matchLabels and the operator In."""
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


def peers(policy: Manifest, direction: str) -> Iterator[Manifest]:
    """Return all peers that a NetworkPolicy lets in (`from`) or out (`to`)."""
    rules, side = {"from": ("ingress", "from"), "to": ("egress", "to")}[direction]
    for rule in policy["spec"].get(rules, []):
        yield from rule[side]
