"""Promises of the manifests: settings, hardening, Ray's ports, memory and disk."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import ray._private.ray_constants
import ray.serve._private.constants
import yaml
from ray import cloudpickle
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from lorikeet.ray_variables import LARGEST_MESSAGE
from lorikeet.serving.deployments import controller, engine, gateway
from lorikeet.settings import Settings
from tests.k8s.manifests import (
    DIGEST,
    OVERLAYS,
    ROOT,
    Manifest,
    containers,
    groups,
    of_kind,
    pods,
    ray_service,
    render,
    selects,
    settings,
)

both = pytest.mark.parametrize("overlay", OVERLAYS)


@both
def test_every_lorikeet_variable_is_a_setting(overlay: str) -> None:
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
def test_ray_carries_the_largest_message(overlay: str) -> None:
    flag = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
    assert hasattr(ray.serve._private.constants, flag)
    assert int(settings(overlay)[flag]) >= LARGEST_MESSAGE


@both
def test_a_replaced_haproxy_finishes_its_streams(overlay: str) -> None:
    flag = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    assert hasattr(ray.serve._private.constants, flag)
    assert int(settings(overlay)[flag]) >= 600


@both
def test_a_stopping_worker_has_time_for_its_streams(overlay: str) -> None:
    """Ray's own limit comes before Kubernetes'."""
    flag = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert hasattr(ray._private.ray_constants, flag)
    drained_s = int(settings(overlay)[flag])
    assert drained_s >= 600
    for name, pod in pods(overlay).items():
        if name != "head":
            assert pod["spec"]["terminationGracePeriodSeconds"] > drained_s


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each != "local"])
def test_a_deleted_clusters_engines_and_head_outlast_its_clients_connections(overlay: str) -> None:
    """HAProxy closes connections, and gateways stay, from when Kubernetes ends their pods."""
    spread_s = int(settings(overlay)["RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S"])
    stay_s = ray.serve._private.constants.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
    waits = {name: seconds_before_its_end(pod) for name, pod in pods(overlay).items()}
    assert waits["gateways"] == 0 < max(spread_s, stay_s) < waits["engines"] < waits["head"]
    drained_s = int(settings(overlay)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    graces = {
        name: pod["spec"]["terminationGracePeriodSeconds"] for name, pod in pods(overlay).items()
    }
    assert graces["engines"] > waits["engines"] + drained_s
    assert graces["head"] > waits["head"]


def seconds_before_its_end(pod: Manifest) -> int:
    """Return the seconds that Kubernetes waits before it signals a pod to end."""
    (container,) = pod["spec"]["containers"]
    if "lifecycle" not in container:
        return 0
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    return int(seconds)


@both
def test_workers_are_probed_every_second_and_survive_one_slow_answer(overlay: str) -> None:
    """KubeRay switches the Service once Serve runs, whether or not the new pods are ready."""
    for name, pod in pods(overlay).items():
        if name == "head":
            continue
        (container,) = pod["spec"]["containers"]
        probe = container["readinessProbe"]
        assert probe["httpGet"] == {"path": "/-/healthz", "port": "serve"}
        assert probe["periodSeconds"] == 1
        assert probe["failureThreshold"] > 1


def test_no_node_is_kept_busy_by_the_application_as_built() -> None:
    """Serve keeps the application as one object, which above Ray's limit would lie on one node."""
    limit = int(settings("local")["RAY_max_direct_call_object_size"])
    parsed = Settings.from_env(
        settings("local") | {"LORIKEET_BASE_MODELS": f"lorikeet-demo={ROOT / 'demo/model'}"}
    )
    engines = {name: engine(parsed, name) for name in parsed.base_models}
    app = gateway(parsed, engines, controller(parsed, engines))
    built = build_app(app, name="lorikeet", default_runtime_env={})
    # If this becomes small, the flag may go.
    assert 100 * 1024 < len(cloudpickle.dumps(built.deployments)) < limit
    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    assert b"max_direct_call_object_size" in raylet.read_bytes()


def test_engines_have_an_account_and_secrets_of_their_own() -> None:
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
    role = "eks.amazonaws.com/role-arn"
    roles = {
        each["metadata"]["name"]: each["metadata"].get("annotations", {}).get(role)
        for each in of_kind("eks", "ServiceAccount")
    }
    assert len({roles["lorikeet"], roles["lorikeet-engine"]} - {None}) == 2
    assert roles["active-cluster"] is None


@both
def test_a_changed_setting_changes_the_ray_service(overlay: str) -> None:
    (config,) = of_kind(overlay, "ConfigMap")
    assert re.fullmatch(r"settings-[a-z0-9]{10}", config["metadata"]["name"])


@both
def test_service_links_set_no_environment_variables(overlay: str) -> None:
    for pod in pods(overlay).values():
        assert pod["spec"]["enableServiceLinks"] is False


@both
def test_ray_requires_its_token(overlay: str) -> None:
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}


@both
def test_the_manifests_run_the_ray_that_the_project_pins(overlay: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = [line for line in project["dependencies"] if line.startswith("ray[")]
    version = ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"]
    assert ray.partition("==")[2].removesuffix("*") == version[: version.rindex(".") + 1]


@both
def test_ray_serve_accepts_the_application(overlay: str) -> None:
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
def test_every_container_has_resource_requests(overlay: str) -> None:
    for pod in pods(overlay).values():
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert "cpu" not in container["resources"]["limits"]  # it would throttle bursts


@both
def test_other_images_are_pinned_by_digest_and_ours_by_tag(overlay: str) -> None:
    for pod in pods(overlay).values():
        for container in containers(pod):
            ours = container["image"].partition(":")[0].rpartition("/")[2] == "lorikeet"
            pin = r":(?!latest$)[\w.-]+" + ("" if ours else DIGEST)
            assert re.search(rf"{pin}$", container["image"])


@both
def test_every_mounted_or_referenced_name_exists(overlay: str) -> None:
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
    others = [m["spec"]["template"]["metadata"]["labels"] for m in of_kind(overlay, "Deployment")]
    for selector in policies:
        assert any(selects(selector, pod) for pod in (*labels, *others)), selector
    for pod in labels:
        assert sum(selects(selector, pod) for selector in budgets) == 1


@both
def test_a_drain_leaves_a_gateway_an_engine_and_every_head(overlay: str) -> None:
    """Kubernetes counts whole pods for a RayCluster. An upgrade has two heads."""
    budgets = of_kind(overlay, "PodDisruptionBudget")
    kept = {each["metadata"]["name"]: each["spec"]["minAvailable"] for each in budgets}
    assert kept == {"head": 2, "gateways": 1, "engines": 1}


def test_the_demos_adapters_fit_the_local_overlays_base_model() -> None:
    adapters = (ROOT / "demo/adapters").rglob("adapter_config.json")
    trained_on = {json.loads(path.read_text())["base_model_name_or_path"] for path in adapters}
    assert trained_on == Settings.from_env(settings("local")).base_models.keys()


def test_base_models_are_where_the_settings_look_for_them() -> None:
    for name in ("gateways", "engines"):
        pod = pods("gpu")[name]["spec"]
        assert "$(BASE_MODELS_URL)" in pod["initContainers"][0]["args"]
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        for folder in Settings.from_env(settings("gpu")).base_models.values():
            assert folder.is_relative_to(mounts["models"])
