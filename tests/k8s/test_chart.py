"""Helm chart: equal to the overlay `gpu` by default, with its values at their paths."""

import json
import re
import shutil
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmValuesError, lint

from k8s.chart.make import COMPONENTS, HERE, SCHEMA, made, rendered, values_schema
from lorikeet.settings import Settings
from tests.k8s.manifests import Manifest, containers, problems, render

DIGEST = "sha256:" + 64 * "a"
ADDRESSES = [{"ipBlock": {"cidr": "10.0.0.0/24"}}]
# Component → values that enable it unchanged.
VALUES: dict[str, Manifest] = {
    "autoscaling": {"autoscaling": {"enabled": True}},
    "gateway-api": {"gateway": {"host": "lorikeet.example.com"}},
    "gcs-fault-tolerance": {"gcsFaultTolerance": {"enabled": True}},
    "load-balancer": {"requestsFrom": ADDRESSES},
}
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


def chart(**values: Any) -> dict[tuple[str, str], Manifest]:
    """Return the objects that `helm install` would send, by kind and name."""
    with Chart.load(HERE) as loaded:
        loaded.validate_schema(values)
        texts = loaded.render(values, name="release", namespace="ours").values()
    found = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def settings(objects: dict[tuple[str, str], Manifest]) -> tuple[str, dict[str, str]]:
    """Return the name of the settings' ConfigMap, and its data."""
    (config,) = (m for (kind, name), m in objects.items() if name.startswith("settings-"))
    return config["metadata"]["name"], config["data"]


def cluster(objects: dict[tuple[str, str], Manifest]) -> Manifest:
    found: Manifest = objects["RayService", "lorikeet"]["spec"]["rayClusterConfig"]
    return found


def pods(objects: dict[tuple[str, str], Manifest]) -> list[Manifest]:
    groups = [cluster(objects)["headGroupSpec"], *cluster(objects)["workerGroupSpecs"]]
    return [group["template"] for group in groups]


@needs_kubectl
def test_generated_files_of_the_chart_are_up_to_date() -> None:
    for name, text in made().items():
        assert (HERE / name).read_text() == text, "run python -m k8s.chart.make"


def test_the_schema_of_values_lists_every_setting() -> None:
    assert (HERE / SCHEMA).read_text() == values_schema(), "run python -m k8s.chart.make"


@needs_kubectl
@pytest.mark.parametrize("components", [(), *((each,) for each in COMPONENTS), tuple(COMPONENTS)])
def test_the_chart_equals_the_overlay_with_the_enabled_components(
    components: tuple[str, ...],
) -> None:
    values = {key: value for each in components for key, value in VALUES[each].items()}
    objects = chart(catalog={"create": False}, **values)
    name, _ = settings(objects)
    ours = {f"{kind}/{each}".replace(name, "settings"): m for (kind, each), m in objects.items()}
    theirs = rendered(*components)
    ours["ConfigMap/settings"]["metadata"].pop("annotations")  # Helm's
    assert ours.keys() == theirs.keys()
    for key, manifest in theirs.items():
        assert _bare(ours[key], name) == _bare(manifest, name), key


def test_the_values_in_the_readme_are_eight_engines_of_a_gpu_each() -> None:
    readme = (HERE.parent / "README.md").read_text()
    (example,) = re.findall(r"```yaml\n(image: .*?)```", readme, re.DOTALL)
    objects = chart(**yaml.safe_load(example))
    assert {
        key: problems(manifest) for key, manifest in objects.items() if problems(manifest)
    } == {}
    _, data = settings(objects)
    wanted = ("LORIKEET_REPLICAS", "LORIKEET_GATEWAYS", "LORIKEET_MAX_CONTEXT", "AWS_REGION")
    assert [data[name] for name in wanted] == ["8", "4", "8192", "eu-central-1"]
    groups = {g["groupName"]: g["replicas"] for g in cluster(objects)["workerGroupSpecs"]}
    assert groups == {"engines": 8, "gateways": 4}


def test_every_object_fits_its_schema() -> None:
    every = {key: value for values in VALUES.values() for key, value in values.items()}
    objects = chart(monitoring={"enabled": True}, **every)
    wrong = {key: problems(manifest) for key, manifest in objects.items()}
    assert {key: found for key, found in wrong.items() if found} == {}


def test_helm_lint_accepts_the_chart() -> None:
    found = lint(HERE, {}, strict=True)["messages"]
    assert [each["error"] for each in found] == ["icon is recommended"]


def test_helm_lint_names_a_misspelt_setting() -> None:
    values = {"settings": {"LORIKEET_MAX_RUNING": "100"}}
    errors = [each["error"] for each in lint(HERE, values, strict=True)["messages"]]
    assert any("LORIKEET_MAX_RUNING" in error for error in errors)


def test_variables_of_ray_and_aws_are_settings_too() -> None:
    theirs = {"RAY_worker_niceness": "0", "AWS_MAX_ATTEMPTS": "3"}
    _, data = settings(chart(settings=theirs))
    assert data.items() > theirs.items()


def test_values_become_settings() -> None:
    _, data = settings(
        chart(
            catalog={"url": "s3://acme/catalog"},
            baseModels={"url": "s3://acme/models", "served": "qwen=/models/qwen"},
            s3={"region": "eu-west-1", "endpoint": "https://s3.acme.com"},
            engines={"replicas": 3},
            settings={"LORIKEET_MAX_QUEUE_S": "5", "LORIKEET_ADAPTER_DISK": "100GiB"},
        )
    )
    parsed = Settings.from_env(data)
    assert parsed.catalog == "s3://acme/catalog"
    assert list(parsed.base_models) == list(parsed.replicas) == ["qwen"]
    assert (parsed.replicas["qwen"], parsed.gateways, parsed.max_queue_s) == (3, 2, 5)
    assert parsed.adapter_disk == 100 * 2**30
    assert data["BASE_MODELS_URL"] == "s3://acme/models"
    assert (data["AWS_REGION"], data["AWS_ENDPOINT_URL"]) == ("eu-west-1", "https://s3.acme.com")


def test_a_changed_setting_changes_the_ray_service() -> None:
    one, other = (chart(settings={"LORIKEET_MAX_QUEUE_S": s}) for s in ("5", "6"))
    assert settings(one)[0] != settings(other)[0]
    assert settings(one)[0] in json.dumps(cluster(one))
    assert cluster(one) != cluster(other)


def test_old_settings_stay_for_the_replaced_cluster() -> None:
    """Helm deletes objects that a release no longer has: pods of that cluster could not restart."""
    objects = chart()
    config = objects["ConfigMap", settings(objects)[0]]
    assert config["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_image_and_its_registrys_login_are_everywhere() -> None:
    image = {"repository": "acme/lorikeet", "digest": DIGEST, "pullSecrets": [{"name": "acme"}]}
    objects = chart(image=image)
    accounts = [m for (kind, _), m in objects.items() if kind == "ServiceAccount"]
    assert all(m["imagePullSecrets"] == [{"name": "acme"}] for m in accounts)
    others = (("Job", "lorikeet-init"), ("Deployment", "active-cluster"))
    templates = (*pods(objects), *(objects[each]["spec"]["template"] for each in others))
    ours = [containers(pod)[-1]["image"] for pod in templates]
    assert ours == 5 * [f"acme/lorikeet@{DIGEST}"]


def test_common_annotations_are_on_every_object_and_pod_beside_their_own() -> None:
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/engines"}
    ours = {"team": "inference"}
    objects = chart(
        commonAnnotations=ours,
        engines={"serviceAccountAnnotations": role},
        gateway={"host": "lorikeet.acme.com", "annotations": {"issuer": "acme"}},
        monitoring={"enabled": True},
    )
    workloads = (("Job", "lorikeet-init"), ("Deployment", "active-cluster"))
    templates = (*pods(objects), *(objects[each]["spec"]["template"] for each in workloads))
    service = objects["RayService", "lorikeet"]["spec"]["serveService"]
    for each in (*objects.values(), *templates, service):
        assert each["metadata"]["annotations"].items() >= ours.items(), each["metadata"]
    account, gateway = (
        objects[each]["metadata"]["annotations"]
        for each in (("ServiceAccount", "lorikeet-engine"), ("Gateway", "lorikeet"))
    )
    assert account == ours | role
    assert gateway == ours | {"issuer": "acme"}
    config = objects["ConfigMap", settings(objects)[0]]
    assert config["metadata"]["annotations"] == ours | {"helm.sh/resource-policy": "keep"}
    job = objects["Job", "lorikeet-init"]["metadata"]["annotations"]
    assert job["helm.sh/hook"] == "pre-install"


def test_pods_are_placed_by_values() -> None:
    here = {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}]}
    objects = chart(engines={**here, "replicas": 5}, gateways={"replicas": 3})
    _, gateways, engines = (pod["spec"] for pod in pods(objects))
    assert (engines["nodeSelector"], engines["tolerations"]) == (
        here["nodeSelector"],
        here["tolerations"],
    )
    assert gateways["nodeSelector"] == {}
    counts = [
        {group[field] for field in ("replicas", "minReplicas", "maxReplicas")}
        for group in cluster(objects)["workerGroupSpecs"]
    ]
    assert counts == [{3}, {5}]


def test_active_cluster_has_its_role_in_the_release_namespace_and_is_placed_like_gateways() -> None:
    here = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"operator": "Exists"}]}
    objects = chart(gateways=here)
    (subject,) = objects["RoleBinding", "active-cluster"]["subjects"]
    assert subject["namespace"] == "ours"
    pod = objects["Deployment", "active-cluster"]["spec"]["template"]["spec"]
    assert {field: pod[field] for field in here} == here


def test_pods_have_the_priority_of_the_values() -> None:
    groups = ("head", "gateways", "engines")
    objects = chart(**{group: {"priorityClassName": f"{group}-class"} for group in groups})
    named = [pod["spec"]["priorityClassName"] for pod in pods(objects)]
    assert named == [f"{group}-class" for group in groups]


def test_the_autoscaler_may_start_as_many_engines_as_the_values_allow() -> None:
    scaled = {"enabled": True, "maxReplicas": 7}
    objects = chart(engines={"replicas": 3}, autoscaling=scaled)
    _, engines = cluster(objects)["workerGroupSpecs"]
    assert (engines["minReplicas"], engines["maxReplicas"]) == (3, 7)
    assert Settings.from_env(settings(objects)[1]).most_engines == 7
    account = objects["ServiceAccount", pods(objects)[0]["spec"]["serviceAccountName"]]
    assert account["metadata"]["name"] == "lorikeet-head"


def test_rays_state_is_in_the_redis_of_the_values() -> None:
    redis = {"redisAddress": "rediss://redis.acme.com:6380", "redisPeers": ADDRESSES}
    objects = chart(gcsFaultTolerance={"enabled": True, "secret": "acme", **redis})
    options = cluster(objects)["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://redis.acme.com:6380"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "acme"
    (rule,) = objects["NetworkPolicy", "redis"]["spec"]["egress"]
    assert rule == {"to": ADDRESSES, "ports": [{"port": 6380, "protocol": "TCP"}]}


def test_the_catalog_is_created_before_the_first_start_with_gateways_role() -> None:
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/gateways"}
    objects = chart(gateways={"serviceAccountAnnotations": role}, s3={"secret": "keys"})
    job, account = objects["Job", "lorikeet-init"], objects["ServiceAccount", "lorikeet-init"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install"
    assert account["metadata"]["annotations"].items() > role.items()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["lorikeet", "init", "--if-absent"]
    assert {e["name"]: e["value"] for e in container["env"]}[
        "LORIKEET_CATALOG"
    ] == "s3://my-bucket/lorikeet"
    assert container["envFrom"] == [{"secretRef": {"name": "keys", "optional": True}}]
    (_, gateways, _) = pods(objects)
    assert container["securityContext"] == containers(gateways)[0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert ("Job", "lorikeet-init") not in chart(catalog={"create": False})


def test_a_host_enables_the_gateway() -> None:
    assert not {"Gateway", "HTTPRoute"} & {kind for kind, _ in chart()}
    objects = chart(gateway={"host": "lorikeet.acme.com", "tlsSecret": "acme-tls"})
    (listener,) = objects["Gateway", "lorikeet"]["spec"]["listeners"]
    assert listener["hostname"] == "lorikeet.acme.com"
    assert listener["tls"]["certificateRefs"] == [{"name": "acme-tls"}]
    assert objects["HTTPRoute", "lorikeet"]["spec"]["hostnames"] == ["lorikeet.acme.com"]


def test_monitors_equal_the_kustomization_with_labels() -> None:
    objects = chart(monitoring={"enabled": True, "labels": {"release": "prometheus"}})
    theirs = {(m["kind"], m["metadata"]["name"]): m for m in render("../monitoring")}
    rules = ("PrometheusRule", "lorikeet")
    assert objects[rules]["spec"] == theirs[rules]["spec"]
    assert objects[rules]["metadata"]["labels"]["release"] == "prometheus"
    dashboard = ("ConfigMap", "lorikeet-dashboard")
    assert objects[dashboard]["data"] == theirs[dashboard]["data"]
    (target,) = objects["ScrapeConfig", "lorikeet"]["spec"]["staticConfigs"]
    assert target == {"targets": ["lorikeet-admin.ours:8001"], "labels": {"job": "lorikeet"}}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engines": {"replica": 3}}, "replica"),
        ({"engines": {"replicas": 0}}, "minimum"),
        ({"catalog": {"url": "/var/lib/lorikeet"}}, "catalog"),
        ({"settings": {"LORIKEET_MAX_RUNNING": 100000000}}, "string"),
        ({"settings": {"LORIKEET_MAX_RUNING": "100"}}, "LORIKEET_MAX_RUNING"),
        ({"settings": {"MAX_RUNNING": "100"}}, "MAX_RUNNING"),
        ({"settings": {"LORIKEET_MAX_RUNNING": " "}}, "LORIKEET_MAX_RUNNING"),
        ({"settings": {"LORIKEET_DEVICE": "gpu"}}, "LORIKEET_DEVICE"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"head": {"priorityClass": "high"}}, "priorityClass"),
        ({"autoscaling": {"maxReplicas": "4"}}, "maxReplicas"),
        ({"gcsFaultTolerance": {"redisAddress": "redis.redis"}}, "redisAddress"),
        ({"gcsFaultTolerance": {"redisPeers": []}}, "redisPeers"),
        ({"requestsFrom": [{"ipBlock": {"cidr": "10.0.0.1"}}]}, "cidr"),
        ({"requestsFrom": [{}]}, "requestsFrom"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Manifest, named: str) -> None:
    with pytest.raises(HelmValuesError, match=named):
        chart(**values)


def _bare(manifest: Manifest, settings_name: str) -> Manifest:
    """Return a manifest without empty values and namespace, with the settings' plain name."""
    bare: Manifest = _without_empty(
        json.loads(json.dumps(manifest).replace(settings_name, "settings"))
    )
    for place in (bare["metadata"], *bare.get("subjects", [])):
        place.pop("namespace", None)
    return bare


def _without_empty(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_empty(child) for child in node]
    if not isinstance(node, dict):
        return node
    children = {key: _without_empty(child) for key, child in node.items()}
    return {key: child for key, child in children.items() if child not in ({}, [], "")}
