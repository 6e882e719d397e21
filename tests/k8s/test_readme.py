"""Numbers and commands of README agree with the manifests."""

import re

from ray._private.ray_constants import LOGGING_REDIRECT_STDERR_ENVIRONMENT_VARIABLE

from tests.k8s.manifests import ROOT, Manifest, of_kind, pods, ray_service, render, settings

README = (ROOT / "k8s/README.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
_UNITS = {"m": 0.001, "": 1.0, "Mi": 2.0**-10, "Gi": 1.0}


def test_the_readmes_requirements_of_local_are_its_pods_requests() -> None:
    (other,) = of_kind("local", "Deployment")
    wanted = [_requests(pod) for pod in (*pods("local").values(), other["spec"]["template"])]
    cpu, memory = (sum(each[name] for each in wanted) for name in ("cpu", "memory"))
    (told,) = re.findall(r"For `local`, (\d+)m of CPU and ([\d.]+) GiB of memory", README)
    assert int(told[0]) == round(1000 * cpu)
    assert memory <= float(told[1]) < memory + 0.1


def test_the_readmes_requirements_of_gpu_are_its_pods_requests() -> None:
    engine, head, gateway = (pods("gpu")[name] for name in ("engines", "head", "gateways"))
    volumes = {v["name"]: _number(v["emptyDir"]["sizeLimit"]) for v in engine["spec"]["volumes"]}
    names, wanted = ("cpu", "memory", "ephemeral-storage"), _requests(engine)
    cores, memory, disk = (round(wanted[name]) for name in names)
    assert (
        f"its GPU, {cores} cores, {memory} GiB of memory and {disk} GiB of disk free for pods "
        f"({volumes['models']:g} for base models, {volumes['cache']:g} for adapters, "
        f"{volumes['tmp']:g} for `/tmp`)" in README
    )
    gateways, apart = int(settings("gpu")["LORIKEET_GATEWAYS"]), _requests(head)
    cores, memory, disk = (
        round(apart[name] + gateways * _requests(gateway)[name]) for name in names
    )
    assert f"Gateways and head need {cores} cores, {memory} GiB and {disk} GiB of disk" in README


def test_the_readme_says_how_long_a_replaced_cluster_stays_and_how_to_delete_it() -> None:
    """KubeRay keeps a cluster that never became ready as long as one whose streams have to end."""
    delay_s = ray_service("gpu")["spec"]["rayClusterDeletionDelaySeconds"]
    assert delay_s >= int(settings("gpu")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert f"deletes the first after {delay_s // 60} minutes" in README
    runbook = OPERATIONS.partition("### LorikeetClusterNotReady\n")[2].partition("\n#")[0]
    for page in (README, runbook):
        assert f"keeps its GPUs for another {delay_s // 60} minutes" in page
        assert "`kubectl -n lorikeet delete raycluster NAME`" in page


def test_the_readme_gives_buildah_the_option_for_stages_named_by_arguments() -> None:
    """Releases of Buildah take such a stage for unused; Docker has no such option."""
    dockerfile = (ROOT / "k8s/Dockerfile").read_text()
    assert "FROM ${FLAVOUR}\n" in dockerfile
    for page in (README, dockerfile.replace("\n# ", " ")):
        assert re.search(r"Buildah (or|and) Podman (add|need) `?--skip-unused-stages=false", page)


def test_the_readme_names_the_monitors_that_need_prometheus_label() -> None:
    (told,) = re.findall(r"kubectl -n lorikeet label ([\w,]+) (\w+) release=", README)
    kinds = {f"{each['kind'].lower()}s" for each in _monitors()}
    assert set(told[0].split(",")) == kinds
    assert {each["metadata"]["name"] for each in _monitors()} == {told[1]}


def test_ray_knows_the_variable_that_sends_its_logs_to_stderr() -> None:
    assert f"`{LOGGING_REDIRECT_STDERR_ENVIRONMENT_VARIABLE}=1`" in README


def _monitors() -> list[Manifest]:
    return [
        each
        for each in render("../monitoring")
        if each["apiVersion"].startswith("monitoring.coreos.com/")
    ]


def _requests(pod: Manifest) -> dict[str, float]:
    """Return cores, and GiB of memory and disk."""
    (container,) = pod["spec"]["containers"]
    return {name: _number(text) for name, text in container["resources"]["requests"].items()}


def _number(quantity: str) -> float:
    digits, unit = re.fullmatch(r"([\d.]+)(\D*)", quantity).groups()  # type: ignore[union-attr]
    return float(digits) * _UNITS[unit]
