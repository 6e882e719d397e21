"""Make the schemas of this folder from what upstream publishes; README.md says from where.

Usage: strip.py _definitions.json CRD.yaml...
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
KINDS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Job": "io.k8s.api.batch.v1.Job",
    "Namespace": "io.k8s.api.core.v1.Namespace",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Pod": "io.k8s.api.core.v1.Pod",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "PriorityClass": "io.k8s.api.scheduling.v1.PriorityClass",
    "Role": "io.k8s.api.rbac.v1.Role",
    "RoleBinding": "io.k8s.api.rbac.v1.RoleBinding",
    "Secret": "io.k8s.api.core.v1.Secret",
    "Service": "io.k8s.api.core.v1.Service",
    "ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
}


def without_descriptions(node: Any) -> Any:
    """Return the schema without prose; a property named description stays."""
    if isinstance(node, dict):
        return {
            key: without_descriptions(value)
            for key, value in node.items()
            if not (key == "description" and isinstance(value, str))
        }
    return [without_descriptions(item) for item in node] if isinstance(node, list) else node


def reachable(start: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions that `start` needs, directly and indirectly."""
    found: dict[str, Any] = {}
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = without_descriptions(definitions[name])
            waiting += references(found[name])
    return dict(sorted(found.items()))


def references(node: Any) -> list[str]:
    """Return the names in every $ref of a schema."""
    if isinstance(node, list):
        return [name for item in node for name in references(item)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
    return own + [name for value in node.values() for name in references(value)]


def main(definitions_path: str, *crd_paths: str) -> None:
    for path in crd_paths:
        crd = yaml.safe_load(Path(path).read_text())
        newest = next(version for version in crd["spec"]["versions"] if version["storage"])
        schema = without_descriptions(newest["schema"]["openAPIV3Schema"])
        schema["properties"].pop("status", None)
        write(f"{crd['spec']['names']['kind'].lower()}.json", schema)
    definitions = json.loads(Path(definitions_path).read_text())["$defs"]
    kinds = {kind: {"$ref": f"#/$defs/{name}"} for kind, name in KINDS.items()}
    write(
        "kubernetes.json",
        {"kinds": kinds, "$defs": reachable(list(KINDS.values()), definitions)},
    )


def write(name: str, schema: Any) -> None:
    (FOLDER / name).write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
