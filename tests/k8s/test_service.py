"""What the manifests promise: settings, hardening, Ray's ports, room."""

import re
import tomllib
from typing import Any

import pytest
import ray.serve._private.constants
import yaml
from ray.serve.schema import ServeDeploySchema

from lorikeet.gateway.body import MAX_JSON_BYTES
from lorikeet.settings import Settings
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    containers,
    groups,
    of_kind,
    peers,
    pods,
    ray_service,
    render,
    selects,
    settings,
)

DIGEST = "@sha256:[0-9a-f]{64}"
both = pytest.mark.parametrize("overlay", OVERLAYS)


@both
def test_every_variable_is_a_setting(overlay: str) -> None:
    parsed = Settings.from_env(settings(overlay))
    assert parsed.base_models


@both
def test_every_container_reads_the_same_settings(overlay: str) -> None:
    (config,) = of_kind(overlay, "ConfigMap")
    for pod in pods(overlay).values():
        for container in containers(pod):
            (named,) = [s["configMapRef"] for s in container["envFrom"] if "configMapRef" in s]
            assert named["name"] == config["metadata"]["name"]


@both
def test_rays_flags_reach_head_and_workers(overlay: str) -> None:
    flags = {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
    }
    assert flags.items() <= settings(overlay).items()


@both
def test_ray_carries_the_largest_request(overlay: str) -> None:
    flag = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
    assert hasattr(ray.serve._private.constants, flag)
    assert int(settings(overlay)[flag]) >= 2 * MAX_JSON_BYTES


@both
def test_a_haproxy_that_is_replaced_ends_its_streams(overlay: str) -> None:
    flag = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    assert hasattr(ray.serve._private.constants, flag)
    assert int(settings(overlay)[flag]) >= 600


@both
def test_a_worker_that_leaves_has_time_for_its_streams(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        if name != "head":
            assert pod["spec"]["terminationGracePeriodSeconds"] > 600


def test_engines_act_as_an_account_that_need_not_write() -> None:
    accounts = {name: pod["spec"]["serviceAccountName"] for name, pod in pods("gpu").items()}
    assert accounts == {
        "head": "lorikeet",
        "gateways": "lorikeet",
        "engines": "lorikeet-engine",
    }
    secrets = {
        name: {s["secretRef"]["name"] for c in containers(pod) for s in c["envFrom"][1:]}
        for name, pod in pods("gpu").items()
    }
    assert secrets["engines"].isdisjoint(secrets["gateways"])
    roles = {m["metadata"]["annotations"].popitem()[1] for m in of_kind("gpu", "ServiceAccount")}
    assert len(roles) == 2


@both
def test_a_changed_setting_changes_the_ray_service(overlay: str) -> None:
    (config,) = of_kind(overlay, "ConfigMap")
    assert re.fullmatch(r"settings-[a-z0-9]{10}", config["metadata"]["name"])


@both
def test_no_service_link_poses_as_a_setting(overlay: str) -> None:
    for pod in pods(overlay).values():
        assert pod["spec"]["enableServiceLinks"] is False


@both
def test_ray_asks_for_its_token(overlay: str) -> None:
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}


@both
def test_the_manifests_run_the_ray_that_the_project_pins(overlay: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = [line for line in project["dependencies"] if line.startswith("ray[")]
    version = ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"]
    assert ray.partition("==")[2].removesuffix("*") == version[: version.rindex(".") + 1]


@both
def test_ray_serve_takes_the_application(overlay: str) -> None:
    config = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "serve_app:app"
    assert (ROOT / "serve_app.py").exists()


@both
def test_the_head_runs_nothing_but_ray(overlay: str) -> None:
    assert groups(overlay)["head"]["rayStartParams"]["num-cpus"] == "0"
    assert ray_service(overlay)["spec"]["excludeHeadPodFromServeSvc"] is True


@both
def test_no_pod_has_more_rights_than_it_needs(overlay: str) -> None:
    for pod in pods(overlay).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@both
def test_every_container_says_what_it_needs(overlay: str) -> None:
    for pod in pods(overlay).values():
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


@both
def test_others_images_are_pinned_by_digest_and_ours_by_tag(overlay: str) -> None:
    for pod in pods(overlay).values():
        for container in containers(pod):
            ours = container["image"].partition(":")[0].rpartition("/")[2] == "lorikeet"
            pin = r":(?!latest$)[\w.-]+" + ("" if ours else DIGEST)
            assert re.search(rf"{pin}$", container["image"])


@both
def test_every_name_that_is_mounted_or_used_exists(overlay: str) -> None:
    names = {(m["kind"], m["metadata"]["name"]) for m in render(overlay)}
    for pod in pods(overlay).values():
        assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in names
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for claim in filter(None, (v.get("persistentVolumeClaim") for v in volumes.values())):
            assert ("PersistentVolumeClaim", claim["claimName"]) in names
        for container in containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()


@both
def test_every_pod_has_a_budget_and_every_policy_a_pod(overlay: str) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(overlay).values()]
    budgets = [m["spec"]["selector"] for m in of_kind(overlay, "PodDisruptionBudget")]
    policies = [m["spec"]["podSelector"] for m in of_kind(overlay, "NetworkPolicy")]
    for selector in policies:
        assert any(selects(selector, pod) for pod in labels), selector
    for pod in labels:
        assert sum(selects(selector, pod) for selector in budgets) == 1


@both
def test_disruption_budgets_are_of_the_kind_kubernetes_takes_for_ray(overlay: str) -> None:
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert budget["spec"]["minAvailable"] == 1


@both
def test_what_is_not_allowed_is_denied(overlay: str) -> None:
    (deny,) = [
        p
        for p in of_kind(overlay, "NetworkPolicy")
        if not p["spec"]["podSelector"] and set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    ]
    assert list(peers(deny, "from")) == list(peers(deny, "to")) == []


@both
def test_the_dashboard_answers_the_operator_and_the_cluster_alone(overlay: str) -> None:
    head = pods(overlay)["head"]["metadata"]["labels"]
    open_ports = {
        policy["metadata"]["name"]
        for policy in of_kind(overlay, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], head)
        for rule in policy["spec"].get("ingress", [])
        if 8265 in [port["port"] for port in rule.get("ports", [{"port": 8265}])]
    }
    assert open_ports == {"ray-internal", "dashboard-from-kuberay"}
    assert all(
        port["port"] != 8265
        for service in of_kind(overlay, "Service")
        for port in service["spec"]["ports"]
    )
    assert not of_kind(overlay, "Ingress")


def comers(overlay: str, group: str, port: int) -> list[dict[str, Any]]:
    """Everybody whom policies beside the cluster's own let in at a port of a group's pods."""
    labels = pods(overlay)[group]["metadata"]["labels"]
    return [
        peer
        for policy in of_kind(overlay, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels)
        and policy["metadata"]["name"] != "ray-internal"
        for rule in policy["spec"].get("ingress", [])
        if port in [each["port"] for each in rule["ports"]]
        for peer in rule["from"]
    ]


def namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


@both
def test_the_ingress_controller_reaches_the_public_listener_and_no_other(overlay: str) -> None:
    for group, pod in pods(overlay).items():
        for port in (port["containerPort"] for c in containers(pod) for port in c.get("ports", [])):
            expected = port == 8000 and group != "head"
            assert (namespace("ingress-nginx") in comers(overlay, group, port)) == expected
    assert comers(overlay, "gateways", 8000) == [namespace("ingress-nginx")]


@both
def test_the_admin_listener_is_for_monitoring_and_for_pods_and_namespaces_with_the_label(
    overlay: str,
) -> None:
    label = {"matchLabels": {"lorikeet-admin": "true"}}
    assert comers(overlay, "gateways", 8001) == [
        {"namespaceSelector": label, "podSelector": label},
        namespace("monitoring"),
    ]


@both
def test_the_admin_service_leads_to_the_gateways_admin_listener(overlay: str) -> None:
    (service,) = of_kind(overlay, "Service")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["type"] == "ClusterIP"
    address = Settings.from_env(settings(overlay)).admin_address
    assert address.host == "0.0.0.0"  # Prometheus and port-forward come by different addresses
    for group, pod in pods(overlay).items():
        found = {
            each["name"]: each["containerPort"]
            for container in containers(pod)
            for each in container.get("ports", [])
        }
        assert selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"]) == (
            group == "gateways"
        )
        assert found.get(port["targetPort"]) == (address.port if group == "gateways" else None)


@both
def test_there_are_pods_for_every_gateway_and_engine(overlay: str) -> None:
    parsed = Settings.from_env(settings(overlay))
    workers = groups(overlay)
    assert workers["gateways"]["replicas"] == parsed.gateways
    if "engines" in workers:
        assert workers["engines"]["replicas"] == sum(parsed.replicas.values())
        assert workers["engines"]["maxReplicas"] == parsed.most_engines


@both
def test_gateways_and_controller_stay_off_the_gpu_nodes(overlay: str) -> None:
    config = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    placed = {d.name: d.ray_actor_options.label_selector for d in application.deployments}
    group = {"ray.io/node-group": "gateways"}
    assert placed == {"gateway": group, "controller": group}
    assert "gateways" in groups(overlay)


@pytest.mark.parametrize(("overlay", "group"), [("local", "gateways"), ("gpu", "engines")])
def test_the_disk_cache_fits_its_volume(overlay: str, group: str) -> None:
    engine = pods(overlay)[group]["spec"]
    (mount,) = [m for m in engine["containers"][0]["volumeMounts"] if m["name"] == "adapters"]
    (volume,) = [v for v in engine["volumes"] if v["name"] == "adapters"]
    parsed = Settings.from_env(settings(overlay))
    assert mount["mountPath"] == str(parsed.cache_dir)
    assert _bytes(volume["emptyDir"]["sizeLimit"]) > parsed.adapter_disk


def test_each_gpu_engine_has_a_gpu_and_room_for_the_host_arena() -> None:
    (engine,) = pods("gpu")["engines"]["spec"]["containers"]
    parsed = Settings.from_env(settings("gpu"))
    assert parsed.device == "cuda"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert _bytes(engine["resources"]["limits"]["memory"]) > 2 * parsed.adapter_host_memory


def test_base_models_are_where_the_settings_look_for_them() -> None:
    for name in ("gateways", "engines"):
        pod = pods("gpu")[name]["spec"]
        assert "$(BASE_MODELS_URL)" in pod["initContainers"][0]["args"]
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        for folder in Settings.from_env(settings("gpu")).base_models.values():
            assert folder.is_relative_to(mounts["models"])


def test_the_image_is_pinned_and_runs_as_the_pods_say() -> None:
    lines = (ROOT / "k8s/Dockerfile").read_text().splitlines()
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")} - {"${FLAVOUR}"}
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert len(bases) == 2
    assert all(re.fullmatch(rf"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+{DIGEST}", b) for b in bases)
    assert [line for line in lines if "pip install" in line] == [
        'RUN pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS}"'
    ]
    for pod in pods("gpu").values():
        context = pod["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_what_the_image_copies_is_sent_to_its_builder() -> None:
    sent = (ROOT / "k8s/Dockerfile.dockerignore").read_text().split()
    lines = (ROOT / "k8s/Dockerfile").read_text().splitlines()
    copied = [
        name
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert "constraints.txt" in copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in sent


def _bytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) * 2**30
