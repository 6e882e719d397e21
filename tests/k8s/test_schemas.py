"""Every manifest is one that the API server would take."""

from copy import deepcopy

import pytest
import yaml

from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    Manifest,
    containers,
    of_kind,
    pods,
    problems,
    ray_service,
    render,
    settings,
)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_its_schema(overlay: str) -> None:
    found = {f"{m['kind']}/{m['metadata']['name']}": problems(m) for m in render(overlay)}
    assert {name: list_ for name, list_ in found.items() if list_} == {}


def test_the_secret_template_fits_its_schema_and_holds_no_value() -> None:
    template = ROOT / "k8s/overlays/gpu/s3-credentials.template.yaml"
    secrets = list(yaml.safe_load_all(template.read_text()))
    for secret in secrets:
        assert problems(secret) == []
        assert set(secret["stringData"].values()) == {""}
    read = {
        source["secretRef"]["name"]
        for pod in pods("gpu").values()
        for container in containers(pod)
        for source in container["envFrom"]
        if "secretRef" in source
    }
    assert {secret["metadata"]["name"] for secret in secrets} == read
    assert template.name not in (template.parent / "kustomization.yaml").read_text()


def test_the_pod_that_creates_the_catalog_fits_the_local_overlay() -> None:
    pod = yaml.safe_load((ROOT / "k8s/overlays/local/init.yaml").read_text())
    assert problems(pod) == []
    (container,) = pod["spec"]["containers"]
    worker = pods("local")["gateways"]["spec"]
    assert container["image"] == worker["containers"][0]["image"]
    assert container["volumeMounts"][0] in worker["containers"][0]["volumeMounts"]
    assert container["securityContext"] == worker["containers"][0]["securityContext"]
    catalog = settings("local")["LORIKEET_CATALOG"]
    assert container["env"] == [{"name": "LORIKEET_CATALOG", "value": catalog}]


def test_a_misspelt_field_is_caught() -> None:
    service = _copy(ray_service("gpu"))
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    (problem,) = problems(service)
    assert "workerGroupSpec" in problem


def test_a_misspelt_field_deep_in_a_pod_is_caught() -> None:
    service = _copy(ray_service("gpu"))
    pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    pod["containers"][0]["imagePullPolcy"] = "Always"
    (problem,) = problems(service)
    assert "imagePullPolcy" in problem


def test_a_missing_field_is_caught() -> None:
    service = _copy(ray_service("gpu"))
    del service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["groupName"]
    (problem,) = problems(service)
    assert "'groupName' is a required property" in problem


def test_a_wrong_type_is_caught() -> None:
    service = _copy(ray_service("gpu"))
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    (problem,) = problems(service)
    assert "0 is not of type 'string'" in problem


def test_mistakes_in_the_core_kinds_are_caught() -> None:
    (policy,) = [p for p in of_kind("gpu", "NetworkPolicy") if p["metadata"]["name"] == "s3"]
    misspelt, missing = _copy(policy), _copy(policy)
    misspelt["spec"]["podSelectors"] = {}
    del missing["spec"]["egress"][0]["to"][0]["ipBlock"]["cidr"]
    assert "podSelectors" in problems(misspelt)[0]
    assert "'cidr' is a required property" in problems(missing)[0]


def _copy(manifest: Manifest) -> Manifest:
    return deepcopy(manifest)
