"""A trainer pushes to a real service: every replica has the version before the store does."""

import hashlib
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray

from demo.fill_catalog import ADAPTERS
from demo.tasks import TASKS
from lorikeet_engine.adapter_format import write_blob
from tests.e2e.conftest import REPLICAS, eventually
from tests.e2e.service_processes import actor_named, complete, engine_processes

TASK = TASKS[0]
GATEWAY = "default#gateway#"


@pytest.fixture(scope="module")
def key(service):
    wanted = {"scopes": ["publish"], "adapters": ["policy*"]}
    made = service.admin("POST", f"/tenants/{TASK.tenant}/keys", json=wanted)
    return made.raise_for_status().json()["key"]


@pytest.fixture
def blob(tmp_path):
    """Make the blob of a step of training: the demo's adapter, a little stronger each time."""
    folder = shutil.copytree(ADAPTERS / TASK.tenant / TASK.name, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())

    def make(step):
        changed = config | {"lora_alpha": config["lora_alpha"] * (1 + step / 1000)}
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        write_blob(folder, tmp_path / "blob")
        return (tmp_path / "blob").read_bytes()

    return make


def push(service, key, blob, name="policy", **query):
    digest = hashlib.sha256(blob).hexdigest()
    return httpx.put(
        f"{service.url}/v1/adapters/{name}/versions/{digest}",
        headers={"authorization": f"Bearer {key}"},
        content=blob,
        params=query,
        timeout=60,
    )


def show(service, key, version):
    adapter = version["adapter"].partition("/")[2]
    return httpx.get(
        f"{service.url}/v1/adapters/{adapter}/versions/{version['digest']}",
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    )


def ask(service, model):
    return httpx.post(
        f"{service.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {service.tenant_keys[TASK.tenant]}"},
        json={
            "model": model,
            "messages": [{"role": "user", "content": TASK.example.prompt}],
            "temperature": 0,
        },
        timeout=60,
    )


def test_every_replica_answers_with_a_pushed_version_while_the_store_is_down(
    service, key, blob, store_link
):
    assert push(service, key, blob(1), wait="durable").status_code == 201  # the key is known
    with store_link.down():
        pushed = push(service, key, blob(2), alias="prod")
        assert pushed.status_code == 201, pushed.text
        version = pushed.json()
        assert (version["ready"], version["durable"], version["aliases"]) == (True, False, ["prod"])
        with ThreadPoolExecutor(12) as pool:
            models = [version["model"], f"{TASK.tenant}/policy"] * 12
            answers = list(pool.map(lambda model: ask(service, model), models))
        assert {answer.status_code for answer in answers} == {200}
        digests = {answer.headers["x-lorikeet-adapter-digest"] for answer in answers}
        assert digests == {version["digest"]}
        assert {answer.headers["x-lorikeet-residency"] for answer in answers} <= {"host", "gpu"}
        said = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
        assert said == {TASK.example.answer}
    assert eventually(lambda: show(service, key, version).json()["durable"], within_s=20)
    assert show(service, key, version).json()["version"] == 2
    holding = [
        replica
        for replica in service.replicas()
        if version["digest"] in {each["digest"] for each in replica["adapters"]}
    ]
    assert len(holding) == REPLICAS


def test_a_gateway_that_dies_leaves_a_push_wholly_there_or_not_at_all(
    service, key, blob, store_link
):
    version = push(service, key, blob(3), name="policy-killed", wait="durable").json()
    made = blob(4)
    with store_link.down():
        lost = push(service, key, made, name="policy-killed", alias="prod").json()
        assert (lost["ready"], lost["durable"]) == (True, False)
        ray.kill(actor_named(GATEWAY))
    model = version["model"]
    assert eventually(lambda: ask(service, model).status_code == 200, within_s=60)
    assert show(service, key, lost).status_code == 404
    prod = ask(service, f"{TASK.tenant}/policy-killed")
    assert prod.headers["x-lorikeet-adapter-digest"] == version["digest"]
    again = push(service, key, made, name="policy-killed", alias="prod", wait="durable")
    assert (again.status_code, again.json()["version"]) == (201, 2)


def test_a_replica_that_lost_a_passing_version_is_sent_it_again(service, key, blob):
    pushed = push(service, key, blob(5), name="policy-passing", lifetime_s=120)
    assert pushed.status_code == 201, pushed.text
    version = pushed.json()
    victim = min(engine_processes(service))
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: victim not in engine_processes(service), within_s=20)
    assert complete(service)

    def all_hold():
        held = [{each["digest"] for each in r["adapters"]} for r in service.replicas()]
        return len(held) == REPLICAS and all(version["digest"] in each for each in held)

    assert eventually(all_hold, within_s=30)
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda _: ask(service, version["model"]), range(18)))
    assert {answer.status_code for answer in answers} == {200}
    now = show(service, key, version).json()
    assert (now["version"], now["durable"]) == (None, False)


def test_tenants_requests_go_on_while_versions_are_pushed(service, key, blob):
    push(service, key, blob(10), name="policy-moving", wait="durable")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, service, f"{TASK.tenant}/policy-moving") for _ in range(24)]
        digests = [
            push(service, key, blob(step), name="policy-moving", alias="prod").json()["digest"]
            for step in range(11, 15)
        ]
        answers = [each.result() for each in asked]
    assert {answer.status_code for answer in answers} == {200}
    began_s = time.monotonic()
    last = ask(service, f"{TASK.tenant}/policy-moving")
    assert last.headers["x-lorikeet-adapter-digest"] == digests[-1]
    assert time.monotonic() - began_s < 5
