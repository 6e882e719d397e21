"""Contents of the image."""

import re
import tomllib

from tests.k8s.manifests import DIGEST, ROOT, pods

DOCKERFILE = (ROOT / "k8s/Dockerfile").read_text()


def test_the_image_is_pinned_and_runs_as_the_pods_say() -> None:
    lines = DOCKERFILE.splitlines()
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


def test_files_copied_into_the_image_are_in_the_build_context() -> None:
    sent = (ROOT / "k8s/Dockerfile.dockerignore").read_text().split()
    lines = DOCKERFILE.splitlines()
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


def test_the_cpu_image_installs_torch_without_cuda() -> None:
    cpu, cuda = (part.partition("\nFROM ")[0] for part in DOCKERFILE.split("\nFROM ")[1:3])
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in cpu
    assert "PIP_EXTRA_INDEX_URL" not in cuda
    told = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make serve"
    assert told in (ROOT / "README.md").read_text()  # the command for machines without an image


def test_a_login_shell_finds_the_commands() -> None:
    """KubeRay may start Ray in a login shell, and Debian's resets PATH."""
    (link,) = [line for line in DOCKERFILE.splitlines() if line.startswith("RUN ln -s ")]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    linked = {path.removeprefix("/opt/lorikeet/bin/") for path in link.split()[3:-1]}
    assert linked == {"ray", "serve", *scripts}
    assert link.split()[-1] == "/usr/local/bin/"
