"""TRL trains the demo model on the CPU, with rollouts of its newest version."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from demo.tasks import TASKS
from tests.e2e.conftest import ROOT, Service

TASK = TASKS[0]
PYTHON = "TRL_PYTHON"
"""Environment variable with a Python that has trl, peft and httpx.

No dependency of the project, as they bring 270 MB of pyarrow.
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"needs {PYTHON}, a Python with trl")
def test_the_documented_rollouts_raise_an_adapters_reward(service: Service, tmp_path: Path) -> None:
    pytest.importorskip("lorikeet.gateway.pushing")
    wanted = {"scopes": ["publish"], "adapters": ["policy*"]}
    made = service.admin("POST", f"/tenants/{TASK.tenant}/keys", json=wanted).raise_for_status()
    paths = ":".join(str(ROOT / folder) for folder in ("platform", "engine"))
    done = subprocess.run(
        [os.environ[PYTHON], str(ROOT / "tests/e2e/grpo_training.py"), str(tmp_path), "16"],
        env={name: os.environ[name] for name in ("PATH", "HOME")}
        | {
            "PYTHONPATH": paths,
            "SERVICE": service.url,
            "KEY": service.tenant_keys[TASK.tenant],
            "PUBLISH_KEY": made.json()["key"],
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert not done.returncode, done.stderr
    rewards = json.loads(done.stdout.splitlines()[-1])
    assert rewards[0] < 0.4
    assert sum(rewards[-4:]) / 4 > 0.6
    client = service.client(TASK.tenant)
    answer = client.chat.completions.create(
        model=f"{TASK.tenant}/policy",
        messages=[{"role": "user", "content": "Tell me about a river."}],
        max_tokens=24,
    )
    text = answer.choices[0].message.content or ""
    assert sum(map("aeiou".count, text)) > len(text) / 2, "the last checkpoint is prod"
