"""TRL trains the demo model on the CPU, with rollouts of its newest version."""

import json
import os
import subprocess
from pathlib import Path

import openai
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


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"needs {PYTHON}, a Python with trl")
def test_trls_async_trainer_loads_each_version_on_all_replicas(service: Service) -> None:
    wanted = {"scopes": ["publish"], "adapters": ["trl-policy-*"]}
    made = service.admin("POST", f"/tenants/{TASK.tenant}/keys", json=wanted).raise_for_status()
    keys = f"{made.json()['key']}:{service.tenant_keys[TASK.tenant]}"
    folder, steps = service.load_from / TASK.tenant / "run", 3
    done = subprocess.run(
        [
            os.environ[PYTHON],
            str(ROOT / "tests/e2e/async_grpo_training.py"),
            str(folder),
            f"{steps}",
        ],
        env={name: os.environ[name] for name in ("PATH", "HOME")}
        | {"SERVICE_URL": service.url.replace("http://", f"http://{keys}@")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["versions"] == steps + 1  # one of them before the first step
    assert told["ratio"] == pytest.approx(1, abs=1e-3)
    client = service.client(TASK.tenant)

    def digest_of(version: int) -> str:
        answer = client.completions.with_raw_response.create(
            model=f"trl-policy-v{version}", prompt="river", max_tokens=1
        )
        return answer.headers["x-lorikeet-adapter-digest"]

    newest = [steps, steps + 1]  # older ones are staler than rollouts may be
    assert len({digest_of(version) for version in newest}) == 2
    with pytest.raises(openai.NotFoundError):
        digest_of(steps - 1)
    for version in newest:
        name = f"{TASK.tenant}/trl-policy-v{version}"
        held = service.holders(name, "gpu") | service.holders(name, "host")
        assert len(held) == len(service.replicas())
