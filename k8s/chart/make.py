"""Generator of the chart's files that come from elsewhere: python -m k8s.chart.make.

The manifests that kustomize renders become templates, with the chart's values at the paths named
here. A component's additions become conditional on a value. `values.schema.json` gets the names of
all settings, so that Helm refuses a misspelt one.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from k8s.chart.template import Manifest, Template
from lorikeet.settings import PREFIX, Settings

HERE = Path(__file__).parent
SCHEMA = "values.schema.json"
# Component → value that enables it.
COMPONENTS = {
    "autoscaling": ".Values.autoscaling.enabled",
    "gateway-api": ".Values.gateway.host",
    "gcs-fault-tolerance": ".Values.gcsFaultTolerance.enabled",
    "load-balancer": ".Values.requestsFrom",
}
_MONITORS = ("lorikeet.json", "prometheusrule.yaml", "scrapeconfig.yaml")
_IMAGE = "registry.example.com/lorikeet"
_SECRETS = {
    "s3-credentials": ".Values.s3.secret",
    "engine-s3-credentials": ".Values.s3.engineSecret",
}
_CLUSTER = "spec/rayClusterConfig"
_PODS = {
    "head": f"{_CLUSTER}/headGroupSpec/template/spec",
    "gateways": f"{_CLUSTER}/workerGroupSpecs/0/template/spec",
    "engines": f"{_CLUSTER}/workerGroupSpecs/1/template/spec",
}
# Path in the RayService → value at that path.
_RAY_SERVICE = {
    f"{_CLUSTER}/workerGroupSpecs/{index}/{field}": f".Values.{group}.replicas"
    for index, group in enumerate(("gateways", "engines"))
    for field in ("replicas", "minReplicas", "maxReplicas")
} | {
    f"{_CLUSTER}/workerGroupSpecs/1/maxReplicas": "ternary .Values.autoscaling.maxReplicas"
    " .Values.engines.replicas .Values.autoscaling.enabled",
    f"{_PODS['engines']}/volumes/1/emptyDir/sizeLimit": ".Values.engines.modelsVolume",
    f"{_PODS['engines']}/volumes/2/emptyDir/sizeLimit": ".Values.engines.adaptersVolume",
}
for _group, _pod in _PODS.items():
    _RAY_SERVICE[f"{_pod}/containers/0/resources"] = f".Values.{_group}.resources"
    for _field in ("nodeSelector", "tolerations", "priorityClassName"):
        _RAY_SERVICE[f"{_pod}/{_field}"] = f".Values.{_group}.{_field}"
_LISTENER = "spec/listeners/0"
# Object → its annotations, which override commonAnnotations.
_ANNOTATIONS = {
    # The cluster that an upgrade replaces reads them until it is deleted.
    "ConfigMap/settings": '(dict "helm.sh/resource-policy" "keep")',
    "Gateway/lorikeet": ".Values.gateway.annotations",
    "ServiceAccount/lorikeet": ".Values.gateways.serviceAccountAnnotations",
    "ServiceAccount/lorikeet-engine": ".Values.engines.serviceAccountAnnotations",
}
_PLACES = {
    "Deployment/active-cluster": {
        f"spec/template/spec/{field}": f".Values.gateways.{field}"
        for field in ("nodeSelector", "tolerations")
    },
    "Gateway/lorikeet": {
        "spec/gatewayClassName": ".Values.gateway.className",
        f"{_LISTENER}/hostname": ".Values.gateway.host",
        f"{_LISTENER}/tls/certificateRefs/0/name": ".Values.gateway.tlsSecret",
    },
    "HTTPRoute/lorikeet": {"spec/hostnames/0": ".Values.gateway.host"},
    "NetworkPolicy/redis": {
        "spec/egress/0/to": ".Values.gcsFaultTolerance.redisPeers",
        "spec/egress/0/ports/0/port": ".Values.gcsFaultTolerance.redisAddress"
        ' | splitList ":" | last | int',
    },
    "NetworkPolicy/requests-from-load-balancer": {"spec/ingress/0/from": ".Values.requestsFrom"},
    "RayService/lorikeet": _RAY_SERVICE,
    "RoleBinding/active-cluster": {"subjects/0/namespace": ".Release.Namespace"},
}
# Component → values in its additions to the RayService.
_ADDED = {
    "gcs-fault-tolerance": {
        f"{_CLUSTER}/gcsFaultToleranceOptions/{place}": f".Values.gcsFaultTolerance.{value}"
        for place, value in (
            ("redisAddress", "redisAddress"),
            ("redisPassword/valueFrom/secretKeyRef/name", "secret"),
        )
    }
}


def made() -> dict[str, str]:
    """Return the text of each generated file, by path."""
    template = Template()
    service = rendered()
    settings = json.dumps(service["ConfigMap/settings"]["data"], indent=1) + "\n"
    files = {f"files/{name}": (HERE.parent / "monitoring" / name).read_text() for name in _MONITORS}
    files["files/settings.json"] = settings
    cluster = service["RayService/lorikeet"]
    plain = deepcopy(cluster)
    for component, condition in COMPONENTS.items():
        more = rendered(component)
        template.put(more["RayService/lorikeet"], _ADDED.get(component, {}))
        template.extend(cluster, plain, more["RayService/lorikeet"], condition)
        added = {name: manifest for name, manifest in more.items() if name not in service}
        text = "{{- if " + condition + " }}\n" + _text(added, template) + "{{- end }}\n"
        files[f"templates/{component}.yaml"] = _note(f"components/{component}") + text
    files["templates/service.yaml"] = _note("overlays/gpu") + _text(service, template)
    return files


def values_schema() -> str:
    """Return the text of values.schema.json, with the schema of `settings` made anew from Settings'
    fields.
    """
    schema = json.loads((HERE / SCHEMA).read_text())
    schema["properties"]["settings"] = {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {"^(AWS|RAY)_[A-Za-z0-9_]+$": {"type": "string"}},
        "properties": {
            PREFIX + name.upper(): _setting(field) for name, field in Settings.model_fields.items()
        },
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _setting(field: FieldInfo) -> dict[str, Any]:
    """Return the schema of a setting's value, which is never empty."""
    if get_origin(field.annotation) is Literal:
        return {"enum": list(get_args(field.annotation))}
    return {"type": "string", "pattern": r"\S"}


def _note(source: str) -> str:
    return "{{- /* Made of k8s/" + source + " by make.py. */ -}}\n"


def rendered(*components: str) -> dict[str, Manifest]:
    """Return the manifests of the overlay `gpu` with these components, by kind and name, except the
    namespace's.
    """
    kustomization = {
        "resources": ["../overlays/gpu"],
        "components": [f"../components/{component}" for component in components],
    }
    with TemporaryDirectory(dir=HERE.parent) as folder:
        (Path(folder) / "kustomization.yaml").write_text(json.dumps(kustomization))
        words = ["kubectl", "kustomize", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    # Kustomize appends a hash to the name; the release appends its own.
    text = re.sub(r"\bsettings-[a-z0-9]{10}\b", "settings", done.stdout)
    manifests = [each for each in yaml.safe_load_all(text) if each["kind"] != "Namespace"]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}


def _text(manifests: dict[str, Manifest], template: Template) -> str:
    for name, manifest in manifests.items():
        manifest["metadata"].pop("namespace", None)  # the release's
        if manifest["kind"] == "ConfigMap":
            manifest["metadata"]["name"] = template.expression('include "lorikeet.settingsName" .')
            manifest["data"] = template.expression('include "lorikeet.settings" .')
        if manifest["kind"] == "ServiceAccount":
            template.put(manifest, {"imagePullSecrets": ".Values.image.pullSecrets"})
        for node in _objects(manifest):
            _refer(node, template)
            if "metadata" in node:
                own = _ANNOTATIONS.get(name, "(dict)") if node is manifest else "(dict)"
                values = f"merge (dict) {own} .Values.commonAnnotations"
                template.put(node, {"metadata/annotations": values})
        template.put(manifest, _PLACES.get(name, {}))
    return template.text(list(manifests.values()))


def _refer(node: Manifest, template: Template) -> None:
    """Let a manifest refer to the Helm release's image, settings and secrets."""
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
    (HERE / SCHEMA).write_text(values_schema())
    for name, text in made().items():
        (HERE / name).write_text(text)
