"""Documented examples of clients from their registries, run against the demo.

The examples differ from the clients' documentation in address, key and models. Tools and formats
are forced where the demo's models, which have no general knowledge, would not use them. The
examples are in tests/clients/examples; those of one client run in make test too
(tests/gateway/test_client_examples.py).
"""

import shutil
from pathlib import Path

import pytest

from demo.tasks import TASKS
from tests.clients import installed
from tests.clients.running import PYTEST, Served
from tests.e2e.conftest import Service

INTAKE = next(task for task in TASKS if task.model == "kestrel/intake")


@pytest.fixture
def served(service: Service) -> Served:
    return Served(service.url, service.tenant_keys[INTAKE.tenant], "lorikeet-demo", INTAKE.model)


@pytest.mark.soak
@pytest.mark.parametrize(
    "script", sorted(script.name for script in installed.EXAMPLES.glob("*_examples.py"))
)
def test_a_python_clients_examples_run(served: Served, script: str) -> None:
    served.run([str(installed.python(script)), *PYTEST, script], installed.EXAMPLES)


@pytest.mark.soak
@pytest.mark.parametrize(
    "script", sorted(script.name for script in installed.EXAMPLES.glob("*.test.mjs"))
)
def test_a_node_clients_examples_run(served: Served, tmp_path: Path, script: str) -> None:
    shutil.copy(installed.EXAMPLES / script, tmp_path)
    (tmp_path / "node_modules").symlink_to(installed.node_modules())
    served.run(["node", "--test", script], tmp_path)
