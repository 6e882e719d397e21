"""Components that an overlay may add: all at once, on the overlay `gpu`."""

import re

import pytest
import yaml

from lorikeet.settings import Settings
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    Manifest,
    groups,
    of_kind,
    peers,
    pods,
    problems,
    ray_service,
    render,
    selects,
    settings,
)

EVERY = OVERLAYS[-1]
HEAD = {"app.kubernetes.io/component": "head"}


def cluster() -> Manifest:
    found: Manifest = ray_service(EVERY)["spec"]["rayClusterConfig"]
    return found


def ports_out(labels: Manifest) -> set[int]:
    """Return the ports that policies let pods with these labels connect to, outside the cluster."""
    return {
        port["port"]
        for policy in of_kind(EVERY, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get("egress", [])
        for port in rule.get("ports", [])
    }


def test_every_component_is_tested_and_in_the_readme() -> None:
    tried = yaml.safe_load((ROOT / "tests/k8s/every-component/kustomization.yaml").read_text())
    there = {path.name for path in (ROOT / "k8s/components").iterdir()}
    assert {path.rpartition("/")[2] for path in tried["components"]} == there
    table = (ROOT / "k8s/README.md").read_text().partition("## Components")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table.partition("\n## ")[0], re.MULTILINE)) == there


def test_files_that_are_applied_by_hand_fit_their_schemas() -> None:
    for file in ("gcs-fault-tolerance/redis-password.template", "models-volume/fill"):
        path = ROOT / f"k8s/components/{file}.yaml"
        assert problems(yaml.safe_load(path.read_text())) == []
        component = yaml.safe_load((path.parent / "kustomization.yaml").read_text())
        assert path.name not in component["resources"]


def test_the_autoscaler_is_on_and_restricted_admits_it() -> None:
    assert cluster()["enableInTreeAutoscaling"] is True
    assert cluster()["autoscalerOptions"]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_autoscaler_alone_has_a_token_for_kubernetes() -> None:
    """KubeRay binds a role to the head's account, so gateways have another account."""
    pod = pods(EVERY)["head"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in cluster()["autoscalerOptions"]["volumeMounts"]
    }
    token = mounts["/var/run/secrets/kubernetes.io/serviceaccount"]
    paths = {
        item["path"]
        for source in token["projected"]["sources"]
        for one in source.values()
        for item in one.get("items", [one])
    }
    assert paths == {"token", "ca.crt", "namespace"}
    for other in pods(EVERY).values():
        for container in other["spec"]["containers"]:
            assert token["name"] not in {mount["name"] for mount in container["volumeMounts"]}
    accounts = [each["spec"]["serviceAccountName"] for each in pods(EVERY).values()]
    assert accounts.count(pod["serviceAccountName"]) == 1


def test_the_autoscaler_reaches_kubernetes() -> None:
    assert {443, 6443} <= ports_out(HEAD)
    assert 6443 not in ports_out({"app.kubernetes.io/component": "gateway"})
    (policy,) = (
        p for p in of_kind(EVERY, "NetworkPolicy") if p["metadata"]["name"] == "kubernetes-api"
    )
    reached = {peer["ipBlock"]["cidr"] for peer in peers(policy, "to")}
    assert reached == {"0.0.0.0/0", "::/0"}  # Kubernetes' own Service may have an IPv6 address


def test_the_autoscaler_may_start_as_many_engines_as_the_settings_ask_for() -> None:
    parsed = Settings.from_env(settings(EVERY))
    engines = groups(EVERY)["engines"]
    assert engines["minReplicas"] < engines["maxReplicas"] == parsed.most_engines


def test_an_engine_has_as_many_gpus_as_ranks() -> None:
    shared = Settings.from_env(settings(EVERY)).tensor_parallel
    resources = pods(EVERY)["engines"]["spec"]["containers"][0]["resources"]
    for each in ("requests", "limits"):
        assert {int(resources[each]["nvidia.com/gpu"])} == set(shared.values()) == {2}


def test_the_gateway_terminates_tls_and_allows_long_streams() -> None:
    (gateway,), (route,) = of_kind(EVERY, "Gateway"), of_kind(EVERY, "HTTPRoute")
    (listener,) = gateway["spec"]["listeners"]
    assert listener["protocol"] == "HTTPS"
    assert listener["tls"]["certificateRefs"]
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["sectionName"]) == ("lorikeet", listener["name"])
    assert route["spec"]["hostnames"] == [listener["hostname"]]
    (rule,) = route["spec"]["rules"]
    served = ray_service(EVERY)["spec"]["serveService"]["metadata"]["name"]
    assert rule["backendRefs"] == [{"name": served, "port": 8000}]
    for timeout in rule["timeouts"].values():
        assert int(timeout.removesuffix("s")) > 600


def test_the_head_reaches_the_redis_that_keeps_its_state() -> None:
    options = cluster()["gcsFaultToleranceOptions"]
    host, port = re.fullmatch(r"([\w.-]+):(\d+)", options["redisAddress"]).groups()  # type: ignore[union-attr]
    (policy,) = (p for p in of_kind(EVERY, "NetworkPolicy") if p["metadata"]["name"] == "redis")
    (peer,) = peers(policy, "to")
    labels = peer["namespaceSelector"]["matchLabels"]
    assert labels == {"kubernetes.io/metadata.name": host.split(".")[1]}
    assert int(port) in ports_out(HEAD)
    path = ROOT / "k8s/components/gcs-fault-tolerance/redis-password.template.yaml"
    template = yaml.safe_load(path.read_text())
    secret = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert secret["name"] == template["metadata"]["name"]
    assert template["stringData"] == {secret["key"]: ""}


@pytest.mark.parametrize("group", ["gateways", "engines"])
def test_base_models_are_read_from_the_volume_and_not_downloaded(group: str) -> None:
    pod = pods(EVERY)[group]["spec"]
    assert "initContainers" not in pod
    (models,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
    claim = models["persistentVolumeClaim"]
    assert claim["readOnly"] is True
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "models"]
    for folder in Settings.from_env(settings(EVERY)).base_models.values():
        assert folder.is_relative_to(mount["mountPath"])
    (volume,) = of_kind(EVERY, "PersistentVolumeClaim")
    assert volume["metadata"]["name"] == claim["claimName"]
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_pod_that_fills_the_volume_downloads_like_engines_do() -> None:
    fill = yaml.safe_load((ROOT / "k8s/components/models-volume/fill.yaml").read_text())
    (container,) = fill["spec"]["containers"]
    (download,) = pods("gpu")["engines"]["spec"]["initContainers"]
    assert container["image"] == download["image"]
    assert container["securityContext"] == download["securityContext"]
    assert container["volumeMounts"] == download["volumeMounts"]
    values = settings("gpu")
    expected = [
        word.replace("$(BASE_MODELS_URL)", values["BASE_MODELS_URL"]) for word in download["args"]
    ]
    assert container["args"] == expected
    assert (
        fill["spec"]["serviceAccountName"] == pods("gpu")["engines"]["spec"]["serviceAccountName"]
    )
    (policy,) = [p for p in of_kind("gpu", "NetworkPolicy") if p["metadata"]["name"] == "s3"]
    assert selects(policy["spec"]["podSelector"], fill["metadata"]["labels"])


def test_all_pods_have_the_priority() -> None:
    (priority,) = of_kind(EVERY, "PriorityClass")
    assert priority["value"] > 0  # the priority of pods without a class
    for pod in pods(EVERY).values():
        assert pod["spec"]["priorityClassName"] == priority["metadata"]["name"]


def test_gateways_and_engines_reach_a_private_s3() -> None:
    for group in ("gateways", "engines"):
        assert {443, 9000} <= ports_out(pods(EVERY)[group]["metadata"]["labels"])


def test_common_annotations_of_an_overlay_are_on_every_object_pod_and_the_tenants_service() -> None:
    service = ray_service(EVERY)["spec"]["serveService"]
    (deployment,) = of_kind(EVERY, "Deployment")
    for each in (
        *render(EVERY),
        *pods(EVERY).values(),
        deployment["spec"]["template"],
        service,
    ):
        assert each["metadata"]["annotations"]["team"] == "inference"


def test_every_account_has_the_registry_login() -> None:
    for account in of_kind(EVERY, "ServiceAccount"):
        assert account["imagePullSecrets"] == [{"name": "registry"}]
