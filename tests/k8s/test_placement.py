"""Placement and number of pods, and their memory and disk."""

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from lorikeet.gateway.batches.runner import MAX_OUTPUT_BYTES, MAX_RUNS
from lorikeet.gateway.routes.files import MAX_FILE_BYTES, MAX_TRANSFERS
from lorikeet.settings import Settings
from tests.k8s.manifests import (
    OVERLAYS,
    groups,
    pods,
    ray_service,
    selects,
    settings,
)

both = pytest.mark.parametrize("overlay", OVERLAYS)


@both
def test_every_pod_limits_its_use_of_the_nodes_disk(overlay: str) -> None:
    for pod in pods(overlay).values():
        (ray_container,) = pod["spec"]["containers"]
        disk = ray_container["resources"]["limits"]["ephemeral-storage"]
        assert "ephemeral-storage" in ray_container["resources"]["requests"]
        volumes = [v["emptyDir"]["sizeLimit"] for v in pod["spec"]["volumes"] if "emptyDir" in v]
        assert sum(map(_bytes, volumes)) < _bytes(disk)


@both
def test_rays_resources_do_not_depend_on_container_requests(overlay: str) -> None:
    for name, group in groups(overlay).items():
        assert int(group["rayStartParams"]["num-cpus"]) == {"head": 0, "gateways": 2}.get(name, 8)


def test_a_node_with_two_cores_has_room_for_the_local_overlay() -> None:
    """Kubernetes' own pods take most of one core."""
    requested = [
        container["resources"]["requests"]
        for pod in pods("local").values()
        for container in pod["spec"]["containers"]
    ]
    assert sum(int(each["cpu"].removesuffix("m")) for each in requested) < 1000
    assert sum(_bytes(each["memory"]) for each in requested) <= 4 * 2**30


@both
def test_pods_of_a_group_are_spread_over_nodes_and_zones_if_possible(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        if name != "head":
            rules = pod["spec"]["topologySpreadConstraints"]
            topology = {rule["topologyKey"] for rule in rules}
            assert topology == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
            for rule in rules:
                assert selects(rule["labelSelector"], pod["metadata"]["labels"])
                # Else pods of a replaced cluster would repel those of the new one.
                assert rule["matchLabelKeys"] == ["ray.io/cluster"]


def test_head_and_gateways_stay_off_nodes_with_gpus_if_possible() -> None:
    for name, pod in pods("gpu").items():
        affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
        (preferred,) = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [None])
        avoided = preferred and {
            rule["key"]
            for rule in preferred["preference"]["matchExpressions"]
            if rule["operator"] == "DoesNotExist"
        }
        assert (avoided is None) == (name == "engines")
        assert avoided is None or "nvidia.com/gpu.present" in avoided


@pytest.mark.parametrize("overlay", ["eks", "gke"])
def test_a_clouds_overlay_names_the_nodes_of_engines_and_of_nothing_else(overlay: str) -> None:
    named = {name for name, pod in pods(overlay).items() if "nodeSelector" in pod["spec"]}
    assert named == {"engines"}


@both
def test_there_are_pods_for_every_gateway_and_engine(overlay: str) -> None:
    parsed = Settings.from_env(settings(overlay))
    workers = groups(overlay)
    for count in ("replicas", "minReplicas", "maxReplicas"):
        assert workers["gateways"][count] == parsed.gateways
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
    (mount,) = [m for m in engine["containers"][0]["volumeMounts"] if m["name"] == "cache"]
    (volume,) = [v for v in engine["volumes"] if v["name"] == "cache"]
    parsed = Settings.from_env(settings(overlay))
    assert mount["mountPath"] == str(parsed.cache_dir)
    assert _bytes(volume["emptyDir"]["sizeLimit"]) > parsed.adapter_disk + (parsed.kv_disk or 0)


@both
def test_gateways_controller_and_engines_can_write_to_their_cache_folder(overlay: str) -> None:
    """Gateways keep the catalog's view there; the controller is in their group."""
    folder = Settings.from_env(settings(overlay)).cache_dir
    for name, pod in pods(overlay).items():
        if name != "head":
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            (mount,) = [
                each
                for each in pod["spec"]["containers"][0]["volumeMounts"]
                if folder.is_relative_to(each["mountPath"])
            ]
            assert not mount.get("readOnly")
            assert "emptyDir" in volumes[mount["name"]]


@both
def test_gateways_have_room_for_their_batches_and_a_tenants_uploads(overlay: str) -> None:
    """An upload is on the disk twice: as it arrives, and as it goes to the store."""
    volumes = pods(overlay)["gateways"]["spec"]["volumes"]
    (tmp,) = [volume["emptyDir"] for volume in volumes if volume["name"] == "tmp"]
    running = MAX_RUNS * MAX_FILE_BYTES + MAX_OUTPUT_BYTES
    assert _bytes(tmp["sizeLimit"]) > running + 2 * MAX_TRANSFERS * MAX_FILE_BYTES


def test_each_gpu_engine_has_a_gpu_and_room_for_the_host_arena() -> None:
    (engine,) = pods("gpu")["engines"]["spec"]["containers"]
    parsed = Settings.from_env(settings("gpu"))
    assert parsed.device == "cuda"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
    on_host = 2 * parsed.adapter_host_memory + (parsed.kv_host_memory or 0)
    assert _bytes(engine["resources"]["limits"]["memory"]) > on_host


def _bytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) * 2**30
