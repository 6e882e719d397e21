"""Write the chart's files that are made of manifests: python -m k8s.chart.make.

What kustomize renders becomes templates, with the chart's values in the places named here.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
_IMAGE = "registry.example.com/lorikeet"
_CLUSTER = "spec/rayClusterConfig"
_PODS = {
    "head": f"{_CLUSTER}/headGroupSpec/template/spec",
    "gateways": f"{_CLUSTER}/workerGroupSpecs/0/template/spec",
    "engines": f"{_CLUSTER}/workerGroupSpecs/1/template/spec",
}
# By place, the value that stands there.
_RAY_SERVICE = {
    f"{_CLUSTER}/workerGroupSpecs/{index}/{field}": f"{group}.replicas"
    for index, group in enumerate(("gateways", "engines"))
    for field in ("replicas", "minReplicas", "maxReplicas")
}
for _group, _pod in _PODS.items():
    _RAY_SERVICE[f"{_pod}/containers/0/resources"] = f"{_group}.resources"
    _RAY_SERVICE[f"{_pod}/nodeSelector"] = f"{_group}.nodeSelector"
    _RAY_SERVICE[f"{_pod}/tolerations"] = f"{_group}.tolerations"
_RAY_SERVICE[f"{_PODS['engines']}/volumes/1/emptyDir/sizeLimit"] = "engines.modelsVolume"
_RAY_SERVICE[f"{_PODS['engines']}/volumes/2/emptyDir/sizeLimit"] = "engines.adaptersVolume"
_ACCOUNTS = {"lorikeet": "gateways", "lorikeet-engine": "engines"}
_SECRETS = {"s3-credentials": "s3.secret", "engine-s3-credentials": "s3.engineSecret"}
_MONITORS = ("lorikeet.json", "prometheusrule.yaml", "scrapeconfig.yaml")
_LISTENER = "spec/listeners/0"
_GATEWAY = {
    "spec/gatewayClassName": "gateway.className",
    "metadata/annotations": "gateway.annotations",
    f"{_LISTENER}/hostname": "gateway.host",
    f"{_LISTENER}/tls/certificateRefs/0/name": "gateway.tlsSecret",
}
_ROUTE = {"spec/hostnames/0": "gateway.host"}

Manifest = dict[str, Any]


class Template:
    """Manifests in which expressions of Helm's language stand."""

    def __init__(self) -> None:
        self._expressions: list[str] = []

    def expression(self, text: str) -> str:
        """Return what stands for it until the text is made."""
        self._expressions.append(text)
        return f"EXPRESSION-{len(self._expressions) - 1}-"

    def put(self, manifest: Manifest, values: dict[str, str]) -> None:
        """Put values into their places, as JSON, which is YAML too."""
        for place, value in values.items():
            *path, last = (int(step) if step.isdigit() else step for step in place.split("/"))
            node: Any = manifest
            for step in path:
                node = node[step]
            node[last] = self.expression(f".Values.{value} | toJson")

    def text(self, manifests: list[Manifest]) -> str:
        """Return the template's file."""
        text = yaml.safe_dump_all(manifests, width=1000)
        return re.sub(
            r"EXPRESSION-(\d+)-", lambda m: "{{ " + self._expressions[int(m[1])] + " }}", text
        )


def made() -> dict[str, str]:
    """Each file's text."""
    service = [m for m in _rendered("overlays/gpu") if m["kind"] != "Namespace"]
    (config,) = (m for m in service if m["kind"] == "ConfigMap")
    settings = json.dumps(config["data"], indent=1) + "\n"
    template = Template()
    for manifest in service:
        _fill(manifest, template)
    gateway, route = _rendered("components/gateway-api")
    template.put(gateway, _GATEWAY)
    template.put(route, _ROUTE)
    guard = "{{- if .Values.gateway.host }}\n"
    return {
        **{f"files/{name}": (HERE.parent / "monitoring" / name).read_text() for name in _MONITORS},
        "files/settings.json": settings,
        "templates/service.yaml": _note("overlays/gpu") + template.text(service),
        "templates/gateway.yaml": _note("components/gateway-api")
        + guard
        + template.text([gateway, route])
        + "{{- end }}\n",
    }


def _note(source: str) -> str:
    return "{{- /* Made of k8s/" + source + " by make.py. */ -}}\n"


def _rendered(folder: str) -> Iterator[Manifest]:
    words = ["kubectl", "kustomize", str(HERE.parent / folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    yield from yaml.safe_load_all(done.stdout)


def _fill(manifest: Manifest, template: Template) -> None:
    metadata = manifest["metadata"]
    metadata.pop("namespace", None)  # the release's
    if manifest["kind"] == "ConfigMap":
        metadata["name"] = template.expression('include "lorikeet.settingsName" .')
        manifest["data"] = template.expression('include "lorikeet.settings" .')
    if manifest["kind"] == "ServiceAccount":
        group = _ACCOUNTS[metadata["name"]]
        annotations = {"metadata/annotations": f"{group}.serviceAccountAnnotations"}
        template.put(manifest, {**annotations, "imagePullSecrets": "image.pullSecrets"})
    if manifest["kind"] == "RayService":
        for node in _objects(manifest):
            _refer(node, template)
        template.put(manifest, _RAY_SERVICE)


def _refer(node: Manifest, template: Template) -> None:
    """Name the release's image, settings and secrets where others stand."""
    if str(node.get("image", "")).startswith(_IMAGE):
        node["image"] = template.expression('include "lorikeet.image" . | toJson')
    if "configMapRef" in node:
        node["configMapRef"]["name"] = template.expression('include "lorikeet.settingsName" .')
    if "secretRef" in node:
        template.put(node, {"secretRef/name": _SECRETS[node["secretRef"]["name"]]})


def _objects(node: Any) -> Iterator[Manifest]:
    if isinstance(node, dict):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from _objects(child)


if __name__ == "__main__":
    for name, text in made().items():
        (HERE / name).write_text(text)
