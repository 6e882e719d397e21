"""Clients from their registries, each with its own documented examples, against the demo.

Only the service's address, the key and the models are others than in the clients' documentation,
and tools and formats are forced where the demo's models, which have no general knowledge, would not
use them. The examples are in tests/clients/examples.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from demo.tasks import TASKS
from tests.clients import installed
from tests.e2e.conftest import Service

INTAKE = next(task for task in TASKS if task.model == "kestrel/intake")
RUN_S = 600
PYTEST = ["-m", "pytest", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-q"]


def environment(service: Service) -> dict[str, str]:
    key = service.tenant_keys[INTAKE.tenant]
    given = {
        "OPENAI_BASE_URL": f"{service.url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_API_KEY": key,
        "MODEL": "lorikeet-demo",
        "ORDERS_MODEL": INTAKE.model,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from the network
        "AI_SDK_LOG_WARNINGS": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {name: os.environ[name] for name in ("PATH", "HOME")} | given


def run(command: list[str], service: Service, folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(service),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    "script", sorted(script.name for script in installed.EXAMPLES.glob("*_examples.py"))
)
def test_a_python_clients_examples_run(service: Service, script: str) -> None:
    run([str(installed.python()), *PYTEST, script], service, installed.EXAMPLES)


@pytest.mark.soak
@pytest.mark.parametrize(
    "script", sorted(script.name for script in installed.EXAMPLES.glob("*.test.mjs"))
)
def test_a_node_clients_examples_run(service: Service, tmp_path: Path, script: str) -> None:
    shutil.copy(installed.EXAMPLES / script, tmp_path)
    (tmp_path / "node_modules").symlink_to(installed.node_modules())
    run(["node", "--test", script], service, tmp_path)
